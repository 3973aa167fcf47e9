"""What a node and its command line say of themselves: place, scheduler, devices, secrets."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from everstep.observe.redaction import redact_words
from everstep_services.cli.run import rank_count
from everstep_services.cli.run.arguments import UsageError
from everstep_services.cli.run.environment import address_towards, is_elsewhere
from everstep_services.cli.run.fingerprint import fingerprint
from everstep_services.cli.run.start import record
from tests.unit.agent.run_plans import BUS, plan, refused

_TREE = {"SLURM_TOPOLOGY_ADDR": "s0.s3.n3", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}
_BLOCK = {"SLURM_TOPOLOGY_ADDR": "b4.n17", "SLURM_TOPOLOGY_ADDR_PATTERN": "block.node"}
_FROM_NAME = "NVRX_INFRA_RANK_FROM_NODENAME"
_BY_NAME = {_FROM_NAME: "1"}


@pytest.mark.parametrize("name", ["login", "n1234567890", ""])
def test_a_node_name_without_a_place_is_one_line(home: Path, name: str) -> None:
    text = refused(home, "train.py", SLURMD_NODENAME=name, **_BY_NAME)
    assert text.startswith(f"SLURMD_NODENAME={name!r} has no number of up to 9 digits, which NVRX")


@pytest.mark.parametrize(
    ("words", "environ", "place"),
    [
        ([], {}, None),
        ([], {"JOB_COMPLETION_INDEX": "5"}, 5),
        ([], {"JOB_COMPLETION_INDEX": "5", "SLURM_NODEID": "4"}, 4),
        ([], {"SLURM_NODEID": "4", "SLURM_PROCID": "3"}, 3),
        (
            ["--node-id=x"],
            {
                "SLURM_NODEID": "1",
                "SLURM_PROCID": "9",
                "SLURM_STEP_NUM_TASKS": "16",
                "SLURM_STEP_NUM_NODES": "2",
            },
            1,
        ),
        ([], {"SLURM_PROCID": "3", "CROSS_SLURM_PROCID": "8"}, 8),
        ([], {"SLURM_PROCID": "3", **_BLOCK}, 4 * 10**10 + 17),
        ([], _BLOCK, 4 * 10**10 + 17),
        ([], {"CROSS_SLURM_PROCID": "8", **_BLOCK}, 8),
        ([], {"SLURM_PROCID": "3", **_BLOCK, "SLURM_TOPOLOGY_ADDR": "b4.login"}, 3),
        ([], {"SLURM_PROCID": "3", **_TREE}, 3),
        ([], {"SLURM_PROCID": "3", **_BLOCK, "SLURMD_NODENAME": "r2n07", **_BY_NAME}, 207),
        ([], {"SLURM_PROCID": "3", "SLURMD_NODENAME": "n7", _FROM_NAME: "0"}, 3),
        ([], {"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "5", "SLURM_NNODES": "4"}, 21),
        ([], {"SLURM_PROCID": "1", "SLURM_ARRAY_TASK_ID": "5"}, 1),
        ([], {"SLURM_PROCID": "3", "NODE_RANK": "2"}, 2),
        ([], {"NODE_RANK": "2", "GROUP_RANK": "1"}, 1),
        ([], {"GROUP_RANK": "1", "EVERSTEP_AGENT__INFRA_RANK": "6"}, 6),
        ([], {"GROUP_RANK": "1", "PET_NODE_RANK": "7"}, 7),
        (["--node-rank=8"], {"PET_NODE_RANK": "7"}, 8),
        (["--node-rank=8", "--infra-rank=9"], {"GROUP_RANK": "1"}, 9),
    ],
)
def test_who_says_the_place_of_a_node(
    home: Path, words: list[str], environ: dict[str, str], place: int | None
) -> None:
    assert plan(home, *words, "train.py", **environ).infra_rank == place


@pytest.mark.parametrize(
    "name", ["GROUP_RANK", "NODE_RANK", "SLURM_PROCID", "SLURM_NODEID", "JOB_COMPLETION_INDEX"]
)
@pytest.mark.parametrize("text", ["x", "-1", "1.5", "9" * 40, "٣"])
def test_a_malformed_place_is_one_line(home: Path, name: str, text: str) -> None:
    said = refused(home, "train.py", **{name: text})
    assert said == (
        f"{name}={text!r} is not a whole number, 0 or more; correct it, or give --infra-rank"
    )


def test_slurm(home: Path) -> None:
    """Requeues and array tasks have names of their own (A12.3)."""
    environ = {
        "SLURM_JOB_ID": "77",
        "SLURM_RESTART_COUNT": "2",
        "SLURMD_NODENAME": "n3.cluster",
        "SLURM_TOPOLOGY_ADDR": "s0.s3.n3",
        "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node",
    }
    made = plan(home, "--nnodes=4", *BUS, "train.py", **environ)
    assert (made.job, made.allocation, made.node) == (
        "slurm-77",
        "slurm-77-restart-2",
        "n3-cluster",
    )
    assert (made.scheduler.name, made.scheduler.job, made.scheduler.attempt) == ("slurm", "77", 2)
    assert made.topology == ("s0", "s3")
    array = {"SLURM_ARRAY_JOB_ID": "70", "SLURM_ARRAY_TASK_ID": "7"}
    assert plan(home, "train.py", **environ, **array).scheduler.job == "70_7"
    crowd = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NUM_NODES": "2"}
    assert "use srun --ntasks-per-node=1" in refused(home, "train.py", **environ, **crowd)
    assert "SLURM_RESTART_COUNT='x'" in refused(
        home, "train.py", **{**environ, "SLURM_RESTART_COUNT": "x"}
    )


def test_allocations_without_a_scheduler_differ(home: Path) -> None:
    assert plan(home, "train.py").allocation != plan(home, "train.py").allocation


# -- counting ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "seen"),
    [
        (None, 4), ("0,1", 2), ("3", 1), ("", 0), ("-1", 0), ("0,-1,2", 1), ("0,9,1", 1),
        ("1,1", 0), (" 0 , 2 ", 2), ("GPU-5e9c,GPU-77aa", 2), ("MIG-1", 1), ("x", 0), ("01,1", 0),
    ],
)  # fmt: skip
def test_gpus_that_a_rank_would_see(visible: str | None, seen: int) -> None:
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert rank_count.count_gpus(environ, lambda: 4) == seen


def test_ranks_for_each_device_or_core(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(rank_count, "_installed_gpus", lambda: 0)
    assert rank_count.count_ranks("cpu", {}, sys.executable) == (cores, "CPU cores")
    assert rank_count.count_ranks("auto", {}, sys.executable)[0] == cores
    with pytest.raises(UsageError, match="there is no GPU here"):
        rank_count.count_ranks("gpu", {}, sys.executable)
    monkeypatch.setattr(rank_count, "_installed_gpus", lambda: 8)
    assert rank_count.count_ranks("GPU", {}, sys.executable) == (8, "GPUs")
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES is ''"):
        rank_count.count_ranks("gpu", {"CUDA_VISIBLE_DEVICES": ""}, sys.executable)


def test_what_only_torch_can_count_is_counted_by_torch() -> None:
    with pytest.raises(UsageError, match="torch finds no such device here"):
        rank_count.count_ranks("xpu", os.environ, sys.executable)


# -- secrets -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", "abc", "x"], ("--api-key", "***", "x")),
        (["--hf_token=abc"], ("--hf_token=***",)),
        (["wandb.api_key=abc", "lr=3"], ("wandb.api_key=***", "lr=3")),
        (["--password", "--verbose"], ("--password", "--verbose")),
        (["--seed", "42", "--tokenizer", "t5"], ("--seed", "42", "--tokenizer", "t5")),
        (["--max-tokens", "9", "--pad-token", "<p>"], ("--max-tokens", "9", "--pad-token", "<p>")),
        (["s3://u:pw123@host/x"], ("s3://u:***@host/x",)),
        (["evs_abcdefgh"], ("evs_***",)),
    ],
)
def test_secrets_of_a_command_are_masked(words: list[str], shown: tuple[str, ...]) -> None:
    """Keys, tokens and passwords among a script's arguments (A13.5)."""
    assert redact_words(words) == shown


def test_the_command_that_runs_is_not_masked(home: Path) -> None:
    made = plan(home, "train.py", "--api-key", "hunter2")
    assert made.command.arguments == ("--api-key", "hunter2")
    assert "hunter2" not in str(made.spec)
    assert "hunter2" not in str(record(made))


def test_a_fingerprint_tells_attempts_apart_and_not_nodes() -> None:
    base = fingerprint(["a"], ["b"], {"HOSTNAME": "n1", "NCCL_DEBUG": "INFO"})
    assert base == fingerprint(["a"], ["b"], {"HOSTNAME": "n2", "NCCL_DEBUG": "INFO"})
    assert base != fingerprint(["a"], ["b"], {"NCCL_DEBUG": "WARN"})
    assert base != fingerprint(["a", "b"], [], {"NCCL_DEBUG": "INFO"})
    assert fingerprint([], [], {"HF_TOKEN": "x"}) == fingerprint([], [], {"HF_TOKEN": "y"})


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("nats://127.0.0.1:4222", "127.0.0.1"),
        ("tls://user@127.0.0.1:4222,nats://x", "127.0.0.1"),
        ("nats://[::1]:4222", "::1"),
    ],
)
def test_the_address_that_reaches_the_bus(url: str, address: str) -> None:
    assert address_towards(url) in {address, __import__("socket").gethostname()}


@pytest.mark.parametrize(
    ("address", "elsewhere"), [("127.0.0.1", False), ("localhost", False), ("203.0.113.7", True)]
)
def test_an_address_that_no_interface_has(address: str, elsewhere: bool) -> None:
    assert is_elsewhere(address) == elsewhere


def test_a_name_that_nobody_knows_may_be_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    assert not is_elsewhere("not-yet.in.dns")


def test_a_bus_host_that_nobody_knows_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise OSError

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    assert address_towards("nats://no.such.host:4222")
