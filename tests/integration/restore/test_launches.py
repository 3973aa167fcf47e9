"""A training that torchrun launches again finds what its last launch has saved."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint_helpers.saved_by import manifest_of
from tests.e2e.ports import free_port
from trainer_sdk.launchers import given_job_of

SCRIPT = Path(__file__).parents[1] / "scripts" / "launched_again.py"


def launch(folder: Path, step: int, *options: str) -> str:
    """One launch by the real torchrun; what rank 0 says."""
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", "1"]
    command += [str(SCRIPT), str(folder / "root"), str(step)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return next(one for one in done.stdout.splitlines() if one.startswith("restored"))


def test_a_second_launch_by_torchrun_restores_its_own_checkpoint(tmp_path: Path) -> None:
    """A8.7: torchrun makes up a run id for each launch on one node; it names no job."""
    assert launch(tmp_path, 1) == "restored None -1"
    assert launch(tmp_path, 2, "--standalone", "--rdzv-id", "mine") == "restored 1 1"
    assert [manifest_of(tmp_path, step).identity.job for step in (1, 2)] == ["local", "local"]
    assert [manifest_of(tmp_path, step).identity.round for step in (1, 2)] == [1, 2]


def test_the_id_that_a_person_gives_names_the_job(tmp_path: Path) -> None:
    endpoint = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}")
    assert launch(tmp_path, 1, *endpoint, "--rdzv-id", "llama") == "restored None -1"
    assert manifest_of(tmp_path, 1).identity.job == "llama"


@pytest.mark.parametrize(
    ("run_id", "job"),
    [
        ("93532521-5565-4a42-87c0-72bcdf883915", ""),
        ("none", ""),
        ("", ""),
        ("llama 70b", "llama-70b"),
        ("../x", "x"),
        ("4711", "4711"),
    ],
)
def test_a_run_id_that_torchrun_makes_up_is_no_name(run_id: str, job: str) -> None:
    assert given_job_of({"TORCHELASTIC_RUN_ID": run_id}) == job
    assert given_job_of({"TORCHELASTIC_RUN_ID": run_id, "EVERSTEP_JOB": "own"}) == "own"


@pytest.mark.variant
@pytest.mark.timeout(240)
def test_sharded_stages_that_four_ranks_saved_are_whole_on_two(tmp_path: Path) -> None:
    """Keys of its own on each rank, and another number of shards, with `dcp.load` as the oracle."""
    script = Path(__file__).parents[1] / "scripts" / "staged.py"

    def run(ranks: int, action: str) -> str:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
        command += [str(script), str(tmp_path), action]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(4, "save")
    said = run(2, "load")
    assert "stage 0 is whole" in said
    assert "stage 1 is whole" in said
