"""What only a GPU can show, in one command and a few minutes: `make test-gpu`.

Each test says what it would prove. One GPU is enough; NCCL runs in a group of one rank.
"""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from everstep.clock import SystemClock
from everstep.evidence.nccl_ras import parse
from everstep_services.agent.collectors.collection import Scene
from everstep_services.agent.collectors.nccl_ras import nccl_status
from everstep_services.agent.probes.gpu import snapshot
from everstep_services.agent.probes.gpu.nvml import load, opened
from everstep_services.agent.probes.network import collectives
from everstep_services.agent.ranks.device_memory import held
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.stalls.collectives import CollectiveState, read_collectives
from everstep_services.agent.stalls.recorder_traces import read_traces
from everstep_services.agent.timings.collective_entries import parse_recording
from tests.checkpoint_helpers.saved_by import load as restored
from tests.checkpoint_helpers.saved_by import same, saving
from tests.waiting import until
from trainer_sdk.bootstrap.torch_hooks import serve_torch
from trainer_sdk.checkpoint.save.buffers import Buffer
from trainer_sdk.device.gpu_state import gpu_check
from trainer_sdk.nvrx.nccl_check import of_release
from trainer_sdk.page import make_page

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A group with gloo and NCCL in this process, and torch's server in the folder."""
    folder = tmp_path_factory.mktemp("rank")
    os.environ["TORCH_NCCL_ENABLE_TIMING"] = "1"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/meet", rank=0, world_size=1
    )
    serve_torch(str(folder))
    yield folder
    dist.destroy_process_group()


def state_of(folder: Path, *, is_whole: bool = True) -> CollectiveState:
    state = asyncio.run(read_collectives(folder, is_whole=is_whole))
    assert state is not None
    return state


def busy(seconds: float) -> None:
    """Give the GPU work for about this time."""
    torch.cuda._sleep(int(seconds * 1.5e9))  # type: ignore[no-untyped-call]


def test_the_recorder_of_nccl_is_read(group: Path) -> None:
    """Proves: the handler's name, its parameters, its JSON; gloo's calls are told apart."""
    dist.all_reduce(torch.ones(8))
    dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    traces = asyncio.run(read_traces(group, 5.0, is_whole=True))
    recording = parse_recording(traces)
    assert recording is not None
    assert {entry.op for entry in recording.entries} == {"all_reduce 8"}
    assert {entry.group for entry in recording.entries} == {"0 default_pg", "0/gloo default_pg"}
    assert state_of(group).waits_in == ""


def test_a_collective_that_is_not_over_is_listed(group: Path) -> None:
    """Proves: `started` and `scheduled`, and that asking does not wait for the GPU."""
    busy(5.0)
    dist.all_reduce(torch.ones(8, device="cuda"), async_op=True)
    assert state_of(group, is_whole=False).waits_in.startswith("nccl:all_reduce of default_pg")
    torch.cuda.synchronize()
    until(lambda: not state_of(group, is_whole=False).waits_in, "it is over")


def test_durations_on_the_device_are_recorded(group: Path) -> None:
    """Proves: `duration_ms` with TORCH_NCCL_ENABLE_TIMING=1, from which slow ranks follow."""
    dist.all_reduce(torch.ones(1 << 24, device="cuda"))
    torch.cuda.synchronize()

    def has_lasted() -> bool:
        recording = parse_recording(asyncio.run(read_traces(group, 5.0, is_whole=True)))
        entries = recording.entries if recording is not None else ()
        return any(entry.lasted_s is not None and "16777216" in entry.op for entry in entries)

    until(has_lasted, "the watchdog has noted how long it took")


def test_asking_spoils_no_capture_of_a_graph(group: Path) -> None:
    """Proves: a recorder that is asked during a capture asks CUDA nothing that ends it."""
    graph, tensor = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    dist.all_reduce(torch.ones(8, device="cuda"))
    with torch.cuda.graph(graph):
        asyncio.run(read_traces(group, 5.0, is_whole=True))
        tensor.add_(1)
    graph.replay()
    assert tensor.sum().item() == 8


def test_a_forge_may_ask_whether_there_is_a_gpu() -> None:
    """Proves: with NVML's check only `/dev/nvidiactl` is open, and a forked rank uses CUDA."""
    script = (
        "import os, sys, torch\n"
        "assert torch.cuda.is_available()\n"
        "from trainer_sdk.bootstrap.preload import why_unsafe\n"
        "assert why_unsafe() == '', why_unsafe()\n"
        "if os.fork():\n"
        "    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))\n"
        "assert torch.ones(8, device='cuda').sum().item() == 8\n"
    )
    environ = {**os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, check=False)
    assert done.returncode == 0


def test_a_driver_that_a_module_has_started_spoils_the_fork() -> None:
    """Proves: `cuInit` by others than torch is seen, and a loaded driver alone is not one."""
    script = (
        "import ctypes\n"
        "from trainer_sdk.bootstrap.preload import _has_started_driver, why_unsafe\n"
        "assert not _has_started_driver()\n"
        "driver = ctypes.CDLL('libcuda.so.1')\n"
        "assert not _has_started_driver()\n"
        "assert driver.cuInit(0) == 0\n"
        "assert _has_started_driver() and why_unsafe()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_short_id_of_a_gpu_is_that_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proves: NVML's and torch's ids are the same, and the beginning of one names its GPU."""
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", uuid[:16])
    assert gpu_check(0).uuid == uuid


@pytest.mark.parametrize("order", ["PCI_BUS_ID", "FASTEST_FIRST", None])
def test_a_number_of_a_gpu_is_the_same_card_for_cuda_and_nvml(order: str | None) -> None:
    """Proves: a check by number examines torch's card, or says that the order must be set."""
    environ = {key: value for key, value in os.environ.items() if key != "CUDA_DEVICE_ORDER"}
    script = (
        "import torch; from trainer_sdk.device.gpu_state import gpu_check\n"
        "for n in range(torch.cuda.device_count()):\n"
        "    check = gpu_check(n)\n"
        "    same = check.uuid == f'GPU-{torch.cuda.get_device_properties(n).uuid}'\n"
        "    assert same or 'CUDA_DEVICE_ORDER=PCI_BUS_ID' in check.reason, (n, check)\n"
        "    print('named')\n"
    )
    given = {} if order is None else {"CUDA_DEVICE_ORDER": order}
    words = [sys.executable, "-c", script]
    out = subprocess.run(words, env=environ | given, check=True, capture_output=True, text=True)
    assert out.stdout.split() == ["named"] * torch.cuda.device_count()


def test_the_memory_of_saves_is_pinned(tmp_path: Path) -> None:
    """Proves: cudaHostRegister takes shared memory, and torch then copies asynchronously."""
    torch.ones(1, device="cuda")
    buffer = Buffer(str(tmp_path))
    buffer.fit(1 << 20)
    try:
        assert buffer._pinned_by == 0
        assert buffer.octets.is_pinned()
    finally:
        buffer.remove()


def test_a_replayed_graph_waits_for_a_lazy_copy(tmp_path: Path) -> None:
    """Proves: what is saved is the state at the call, though a graph changes it at once."""
    weight = torch.nn.Parameter(torch.randn(64 << 20, device="cuda"))
    graph, change = torch.cuda.CUDAGraph(), torch.ones((), device="cuda")
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with torch.no_grad(), torch.cuda.graph(graph):
        weight.add_(change)
    with saving(tmp_path, optimizers=(optimizer,)) as rank:
        expected = {"weight": weight.detach().cpu().clone()}
        rank.save(1, {"weight": weight})
        graph.replay()
        assert rank.finish() == [1]
    assert same(restored(tmp_path, 1, {"weight": torch.zeros_like(expected["weight"])}), expected)


def test_nvml_knows_this_process_and_its_gpu() -> None:
    """Proves: structures and versions fit this driver; which ids processes have in a container."""
    keep = torch.ones(1 << 20, device="cuda")
    memory = held(None)
    assert memory, "NVML lists no process that computes"
    namespace = os.stat("/proc/self/ns/pid").st_ino
    assert os.getpid() in memory or namespace != 0xEFFFFFFC
    with opened(load) as nvml:
        seen = snapshot.read(nvml, 0)
    assert (seen.gone, seen.unreadable) == (None, ())
    assert seen.uuid.startswith("GPU-")
    del keep


def test_the_ras_of_nccl_knows_this_process(group: Path) -> None:
    """Proves: the protocol of RAS, and the names in its JSON; it needs a group of NCCL."""
    dist.all_reduce(torch.ones(8, device="cuda"))
    torch.cuda.synchronize()
    here = RankSeen(0, os.getpid(), make_page(str(group / "page-ras")), group)
    found = asyncio.run(nccl_status(Scene([here], 10.0), SystemClock()))
    assert found is not None, "what listens at NCCL_RAS_ADDR, if anything, does not know it"
    ranks = [rank for one in parse(found.content).communicators for rank in one.ranks]
    assert any(rank.pid == os.getpid() and rank.collective_counts for rank in ranks)


def test_nccl_can_be_aborted_while_it_waits(tmp_path: Path) -> None:
    """Proves: this release survives the abort of in-process restart, in a process of its own."""
    release = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    script = (
        "import os, torch, torch.distributed as dist\n"
        f"dist.init_process_group('nccl', init_method='file://{tmp_path}/meet', rank=0,"
        " world_size=1)\n"
        "torch.cuda._sleep(int(3e9))\n"
        "dist.all_reduce(torch.ones(8, device='cuda'), async_op=True)\n"
        "from trainer_sdk.survive.group_abort import abort_groups\n"
        "abort_groups(is_last=True)\n"
        f"dist.init_process_group('nccl', init_method='file://{tmp_path}/again', rank=0,"
        " world_size=1)\n"
        "dist.all_reduce(torch.ones(8, device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    variables = {"TORCH_NCCL_RETHROW_CUDA_ERRORS": "0", "NCCL_NVLS_ENABLE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **variables}, check=False
    )
    assert done.returncode == 0 or of_release(release)


def talked(rank: int, end: "subprocess.Popen[str]") -> tuple[str, str]:
    """What an end says of a pair for which it chooses the backend itself."""
    pair = collectives.Pair(rank, "127.0.0.1", 29417, "", 90.0, 60.0)
    return end.communicate(json.dumps(asdict(pair)) + "\n", timeout=120)


def test_two_ends_of_a_pair_test_add_over_nccl() -> None:
    """Proves: the pair test's own program with NCCL; two ends share one GPU only if NCCL may."""
    command = [sys.executable, "-m", "everstep_services.agent.probes.network.collectives"]
    two = torch.cuda.device_count() > 1
    ends = [
        subprocess.Popen(
            [*command, str(rank if two else 0)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    with ThreadPoolExecutor() as threads:
        said = list(threads.map(talked, range(2), ends))
    if not two and any("Duplicate GPU" in one for talk in said for one in talk):
        pytest.skip("NCCL refuses two ranks on one GPU")
    assert all('"backend": "nccl", "wrong": "", "trouble": ""' in out for out, _ in said), said
