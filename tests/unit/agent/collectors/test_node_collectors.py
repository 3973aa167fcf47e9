"""The kernel's log, control groups, GPUs and variables: of files and cards that a test makes."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep_services.agent.collectors.collection import EvidenceFound, NothingFoundError, Scene
from everstep_services.agent.collectors.environment import environment, releases, told_of
from everstep_services.agent.collectors.gpu import gpus, read_all
from everstep_services.agent.collectors.node_state import NodeState
from everstep_services.agent.ranks.protocol import RankSeen
from tests.fakes.nvml import GPU_IS_LOST, Card, FakeNvml
from trainer_sdk.page import make_page

CLOCK = SystemClock()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def kmsg(*lines: tuple[float, str]) -> str:
    return "".join(f"6,{n},{int(at * 1e6)},-;{text}\n" for n, (at, text) in enumerate(lines))


def kernel_log(root: Path, began_s: float = 100.0) -> EvidenceFound:
    scene = Scene((), 5.0, began_s=began_s)
    found = asyncio.run(NodeState(root).kernel_log(scene, CLOCK))
    assert found is not None
    return found


def test_lines_of_this_round_about_hardware_memory_and_crashes_are_kept(tmp_path: Path) -> None:
    write(
        tmp_path / "dev/kmsg",
        kmsg(
            (50, "python[1]: segfault at 0 ip 0"),
            (120, "usb 1-1: new device of a neighbour"),
            (130, "Memory cgroup out of memory: Killed process 77 (python)"),
            (140, "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
        ),
    )
    found = kernel_log(tmp_path)
    assert found.content.decode().splitlines() == [
        "[  130.000000] Memory cgroup out of memory: Killed process 77 (python)",
        "[  140.000000] NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
    ]
    assert found.summary.startswith("2 lines, the last: NVRM: Xid")


def test_a_quiet_kernel_is_an_answer_too(tmp_path: Path) -> None:
    write(tmp_path / "dev/kmsg", kmsg((120, "usb 1-1: new device")))
    found = kernel_log(tmp_path)
    assert (found.content, found.summary[:13]) == (b"", "nothing about")


def test_a_log_that_is_not_there_or_closed_has_a_reason(tmp_path: Path) -> None:
    with pytest.raises(NothingFoundError, match="no /dev/kmsg"):
        kernel_log(tmp_path)
    (tmp_path / "dev/kmsg").mkdir(parents=True)
    with pytest.raises(NothingFoundError, match="CAP_SYSLOG"):
        kernel_log(tmp_path)


def test_the_groups_of_ranks_tell_of_memory_and_kills(tmp_path: Path) -> None:
    for pid in ("7", "self"):
        write(tmp_path / f"proc/{pid}/cgroup", "0::/job\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.current", "900\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.max", "1000\n")
    write(tmp_path / "sys/fs/cgroup/job/memory.events", "low 0\noom 2\noom_kill 2\n")
    write(tmp_path / "sys/fs/cgroup/job/cpu.stat", "nr_throttled 4\n")
    write(tmp_path / "proc/loadavg", "1 2 3\n")
    (tmp_path / "dev/shm").mkdir(parents=True)
    page = make_page(str(tmp_path / "page"))
    scene = Scene([RankSeen(4, 7, page, tmp_path)], 5.0)
    found = asyncio.run(NodeState(tmp_path).cgroup(scene, CLOCK))
    assert found is not None
    group = str(tmp_path / "sys/fs/cgroup/job")
    assert found.summary.startswith(f"2 killed for lack of memory in {group}; 90 % of 0 MiB")
    document = json.loads(found.content)
    assert document["ranks"] == {"4": group}
    assert document["groups"][group]["cpu.stat"] == "nr_throttled 4"
    assert document["host"] == {"loadavg": "1 2 3"}
    assert document["killed_for_memory"]["group"] == 2
    space = document["shared_memory"]
    assert 0 <= space["free_bytes"] <= space["size_bytes"]


def test_this_machine_has_groups() -> None:
    found = asyncio.run(NodeState().cgroup(Scene((), 5.0), CLOCK))
    assert found is not None
    assert "host" in json.loads(found.content)


def test_a_reading_of_each_gpu_is_kept() -> None:
    cards = (Card("GPU-a"), Card("GPU-b", ecc=(3, 9), temperature=88))
    document = json.loads(read_all(lambda: FakeNvml(cards)))
    assert document["said"] == [
        "GPU 0: no complaint, 41 °C",
        "GPU 1: 3 uncorrected ECC errors, 88 °C",
    ]
    assert [gpu["uuid"] for gpu in document["gpus"]] == ["GPU-a", "GPU-b"]


def test_a_gpu_that_is_lost_is_named() -> None:
    library = FakeNvml([Card("GPU-a", broken={"nvmlDeviceGetUUID": GPU_IS_LOST})])
    document = json.loads(read_all(lambda: library))
    assert "it does not answer on its bus" in document["said"][0]


def test_a_node_without_a_driver_has_nothing_to_say() -> None:
    assert asyncio.run(gpus(Scene((), 5.0), CLOCK, is_here=lambda: False)) is None


def test_where_nvml_cannot_be_asked_the_reason_comes_from_its_process() -> None:
    if os.path.exists("/dev/nvidiactl"):
        pytest.skip("this machine has a driver")
    with pytest.raises(NothingFoundError, match="no NVIDIA driver on this node"):
        asyncio.run(gpus(Scene((), 60.0), CLOCK, is_here=lambda: True))


def test_variables_that_may_explain_a_failure_are_told_and_no_secret() -> None:
    """A13.5: of a training's environment nothing else leaves it."""
    environ = {
        "NCCL_DEBUG": "INFO",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "CUDA_VISIBLE_DEVICES": "0,1",
        "RANK": "3",
        "MASTER_PORT": "1234",
        "NCCL_AUTH_TOKEN": "hidden-1",
        "SLURM_JWT": "hidden-2",
        "TORCH_PROXY": "http://me:hidden-3@proxy",
        "AWS_SECRET_ACCESS_KEY": "hidden-4",
        "WANDB_API_KEY": "hidden-5",
        "HOME": "/home/hidden-6",
    }
    told = told_of(environ)
    assert "hidden" not in json.dumps(told)
    assert told["NCCL_DEBUG"] == "INFO"
    assert told["NCCL_AUTH_TOKEN"] == "***"
    assert set(environ) - set(told) == {"AWS_SECRET_ACCESS_KEY", "WANDB_API_KEY", "HOME"}


def test_what_ranks_have_alike_is_kept_once() -> None:
    environs = {rank: {"NCCL_DEBUG": "INFO", "RANK": str(rank)} for rank in (4, 5)}
    found = asyncio.run(environment(Scene((), 5.0, environs=environs), CLOCK))
    assert found is not None
    document = json.loads(found.content)
    assert document["variables"] == {"NCCL_DEBUG": "INFO"}
    assert document["ranks"] == {"4": {"RANK": "4"}, "5": {"RANK": "5"}}
    assert found.summary.endswith("; 3 variables")


def test_packages_are_those_of_the_ranks_interpreter_only() -> None:
    assert {"everstep", "kernel", "python", "torch"} <= set(releases(sys.executable))
    assert "torch" not in releases("/usr/bin/python-of-somebody")
