"""The environment of ranks, compared with the real torchrun's: each difference has its reason."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from everstep.messages import StartRanks
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.rank_environment import (
    DevicesMissingError,
    RankPaths,
    environment,
)
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.run.arguments import scan
from everstep_services.cli.run.plan import plan_run

DUMP = """
import json, os
folder = os.environ["DUMP_INTO"]
with open(f"{folder}/{os.environ['RANK']}.json", "w") as file:
    json.dump(dict(os.environ), file)
"""

OTHERWISE = {
    "MASTER_ADDR": "slot 0's address; torchrun says localhost for a single node",
    "MASTER_PORT": "a fresh port for each round",
    "TORCHELASTIC_ERROR_FILE": "in the rank's own folder",
    "TORCHELASTIC_MAX_RESTARTS": "the budget, which is another default here",
    "TORCHELASTIC_RUN_ID": "the job's id; torchrun makes one up for a single node",
    "TORCHELASTIC_USE_AGENT_STORE": "rank 0 hosts the store, so that it dies with its round",
}
"""Variables that both set, to different values."""
ADDED = {
    "EVERSTEP_JOB": "the job",
    "EVERSTEP_NODE": "the node",
    "EVERSTEP_ROUND": "the round",
    "EVERSTEP_SLOT": "the node's slot",
}
"""Variables that torchrun has not."""


ORDER = StartRanks(
    id="0" * 32, job="j", round=3, reason="first round", slot=0, slots=1, first_rank=0, ranks=2,
    world_size=2, master_address="127.0.0.1", master_port=29511, restarts=0, max_restarts=10,
)  # fmt: skip


def order(**changes: Any) -> StartRanks:
    return msgspec.structs.replace(ORDER, **changes)


def plan(*words: str, **environ: str) -> RunPlan:
    return plan_run(Invocation(environ=environ), scan([*words, "train.py"], environ))


PATHS = RankPaths(error_file=Path("/run/x/error.json"))


def by_torchrun(folder: Path, *words: str, **environ: str) -> list[dict[str, str]]:
    """The environments that the real torchrun gives to its ranks."""
    script = folder / "dump.py"
    script.write_text(DUMP)
    base = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "OMP_", "TORCH"))}
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, str(script)],
        env={**base, "DUMP_INTO": str(folder), **environ},
        capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    files = sorted(folder.glob("[0-9].json"))
    return [json.loads(file.read_text()) for file in files]


def added(theirs: dict[str, str], base: dict[str, str]) -> set[str]:
    """What is not as in the environment that it began with."""
    return {name for name, value in theirs.items() if base.get(name) != value}


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"OMP_NUM_THREADS": "7", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"},
        {"CUDA_VISIBLE_DEVICES": "4, 6"},
    ],
    ids=["plain", "set by the user", "devices"],
)
def test_ranks_find_what_torchrun_would_give_them(tmp_path: Path, extra: dict[str, str]) -> None:
    theirs = by_torchrun(tmp_path, "--nproc-per-node", "2", "--role", "trainer", **extra)
    assert len(theirs) == 2
    base = {k: v for k, v in os.environ.items() if not k.startswith(("PET_", "OMP_", "TORCH"))}
    base |= {"DUMP_INTO": str(tmp_path), **extra}
    made = plan("--nproc-per-node", "2", "--role", "trainer", **base)
    for local_rank, found in enumerate(theirs):
        ours = environment(made, order(), local_rank, base, PATHS)
        names = added(found, base) | added(ours, base)
        # A shell's own, which no launcher sets.
        names -= {"_", "SHLVL"}
        different = {name for name in names if ours.get(name) != found.get(name)}
        assert different == OTHERWISE.keys() | ADDED.keys()
        assert not ADDED.keys() & found.keys()
        assert set(OTHERWISE) <= found.keys() & ours.keys()


def test_each_rank_has_its_part_of_the_memory_for_images_and_no_other_ones() -> None:
    base = {"EVERSTEP_IMAGES_MOST": "7", "EVERSTEP_IMAGES": "/another/agents"}
    paths = RankPaths(error_file=PATHS.error_file, images=Path("/memory/images"))
    made = plan(EVERSTEP_AGENT__CHECKPOINTS__OWN_MOST_BYTES="1000")
    found = environment(made, order(), 0, base, paths)
    assert found["EVERSTEP_IMAGES_MOST"] == "500"
    assert found["EVERSTEP_IMAGES"] == "/memory/images"
    without = environment(made, order(), 0, base, PATHS)
    assert not {"EVERSTEP_IMAGES", "EVERSTEP_IMAGES_MOST"} & without.keys()
    assert "EVERSTEP_IMAGES_MOST" not in environment(plan(), order(), 0, base, paths)


def test_a_fresh_start_is_allowed_to_ranks_by_whoever_runs_them() -> None:
    name = "EVERSTEP_ALLOW_FRESH_START"
    assert environment(plan("--allow-fresh-start"), order(), 0, {}, PATHS)[name] == "1"
    assert name not in environment(plan(), order(), 0, {}, PATHS)


def test_virtual_local_ranks_are_torchruns(tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--virtual-local-rank")
    for number, extra in enumerate(({}, {"CUDA_VISIBLE_DEVICES": "4, 6"})):
        folder = tmp_path / str(number)
        folder.mkdir()
        theirs = by_torchrun(folder, *words, **extra)
        base = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"} | extra
        for local_rank, found in enumerate(theirs):
            ours = environment(plan(*words, **base), order(), local_rank, base, PATHS)
            for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "RANK", "LOCAL_WORLD_SIZE"):
                assert ours[name] == found[name]


def test_more_ranks_than_devices() -> None:
    base = {"CUDA_VISIBLE_DEVICES": "4"}
    made = plan("--nproc-per-node", "2", "--virtual-local-rank", **base)
    with pytest.raises(DevicesMissingError, match="local rank 1 has no device"):
        environment(made, order(), 1, base, PATHS)


def test_a_later_node_of_a_larger_world() -> None:
    made = plan("--nproc-per-node", "8", "--rdzv-id", "a.b")
    told = order(slot=2, slots=4, first_rank=16, ranks=8, world_size=32, restarts=3)
    found = environment(made, told, 5, {}, PATHS)
    assert found == {
        "RANK": "21", "LOCAL_RANK": "5", "GROUP_RANK": "2", "ROLE_RANK": "21",
        "ROLE_NAME": "default", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "32",
        "GROUP_WORLD_SIZE": "4", "ROLE_WORLD_SIZE": "32", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29511", "TORCHELASTIC_RESTART_COUNT": "3",
        "TORCHELASTIC_MAX_RESTARTS": "10", "TORCHELASTIC_RUN_ID": "a.b",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": "/run/x/error.json", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
        "OMP_NUM_THREADS": "1", "EVERSTEP_JOB": "a-b", "EVERSTEP_NODE": made.node,
        "EVERSTEP_ROUND": "3", "EVERSTEP_SLOT": "2",
    }  # fmt: skip
    assert all(isinstance(value, str) for value in found.values())


def test_no_limit_is_a_number_that_scripts_can_read() -> None:
    found = environment(plan(), order(max_restarts=None), 0, {}, PATHS)
    assert int(found["TORCHELASTIC_MAX_RESTARTS"]) > 10**5


def test_a_single_rank_may_use_all_threads() -> None:
    found = environment(plan(), order(ranks=1, world_size=1), 0, {"A": "b"}, PATHS)
    assert "OMP_NUM_THREADS" not in found
    assert found["A"] == "b"


def test_a_script_that_nvrx_has_started_finds_its_variables() -> None:
    words = ("--as-nvrx", "--infra-rank", "4")
    found = environment(plan(*words), order(restarts=2), 0, {}, PATHS)
    named = {name: value for name, value in found.items() if name.startswith("NVRX_")}
    assert named == {"NVRX_CYCLE": "2", "NVRX_MEMBERSHIP": "active", "NVRX_INFRA_RANK": "4"}
    unplaced = environment(plan("--as-nvrx"), order(slot=1), 0, {}, PATHS)
    assert unplaced["NVRX_INFRA_RANK"] == unplaced["GROUP_RANK"]
    plain = environment(plan(), order(), 0, {}, PATHS)
    assert not any(name.startswith("NVRX_") for name in plain)
