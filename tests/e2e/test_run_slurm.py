"""Under a real Slurm: what it sends at `scancel`, a requeue, the time limit, and as a warning.

Acceptance: A12.1.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import SCRIPTS, kill_all, tagged
from tests.e2e.slurm import Slurm, running_slurm, why_not
from tests.waiting import until

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]
STARTS_WITHIN_S = 120.0
SLURM_WITHIN_S = 240.0
"""It looks at limits once a minute, and lets a requeued job wait."""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    try:
        with running_slurm(tmp_path) as slurm:
            yield slurm
    finally:
        kill_all(tagged(tmp_path.name))


def submit(slurm: Slurm, *options: str, signals: str = "") -> str:
    run = (
        f"{sys.executable} -m everstep_services.cli run --standalone --job slurm "
        f"--nproc-per-node 2 {SCRIPTS / 'loading.py'} {slurm.folder} on"
    )
    script = f"{signals}\nsrun --kill-on-bad-exit=0 {run} &\nwait $!\ncode=$?\n"
    script += "while kill -0 $! 2>/dev/null; do wait $!; code=$?; done\necho exit $code"
    state = str(slurm.folder / "everstep")
    return slurm.submit(script, *options, EVERSTEP_STATE_DIR=state)


def until_saved(slurm: Slurm) -> None:
    until(
        lambda: list((slurm.folder / "saved").glob("step-*")),
        "it has saved",
        within_s=STARTS_WITHIN_S,
    )


def until_left(slurm: Slurm) -> int:
    """The step after which the ranks have saved, once the agent has exited with 91."""
    until(
        slurm.said,
        "it is preempted",
        holds=lambda said: "exit code 91" in said or "exit 91" in said,
        within_s=SLURM_WITHIN_S,
    )
    steps = {(slurm.folder / f"saved-{rank}").read_text() for rank in range(2)}
    (step,) = steps
    return int(step)


def test_scancel_has_it_saved(slurm: Slurm) -> None:
    job = submit(slurm)
    until_saved(slurm)
    slurm.call("scancel", job)
    assert until_left(slurm) > 0


def test_a_requeued_job_goes_on_where_it_was(slurm: Slurm) -> None:
    """`--requeue`: the next attempt restores the step that was saved (A12.3)."""
    job = submit(slurm, "--requeue")
    until_saved(slurm)
    slurm.call("scontrol", "requeue", job)
    step = until_left(slurm)
    again = slurm.folder / "restored-2-0"
    until(again.exists, "the job runs again", within_s=SLURM_WITHIN_S)
    assert int(again.read_text()) == step


def test_the_time_limit_has_it_saved(slurm: Slurm) -> None:
    job = submit(slurm)
    until_saved(slurm)
    slurm.call("scontrol", "update", f"JobId={job}", "TimeLimit=00:00:01")
    assert until_left(slurm) > 0


@pytest.mark.parametrize("name", ["USR1", "USR2"])
def test_a_warning_to_the_steps_has_it_saved(slurm: Slurm, name: str) -> None:
    submit(slurm, f"--signal={name}@65535", "--time=1")  # so early that it comes at once
    assert until_left(slurm) >= 0


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_a_warning_that_a_batch_script_passes_on_has_it_saved(slurm: Slurm, name: str) -> None:
    passes = f"trap 'scancel --signal={name} $SLURM_JOB_ID.0' USR1"
    job = submit(slurm, signals=passes)
    until_saved(slurm)
    slurm.call("scancel", "--batch", "--signal=USR1", job)
    assert until_left(slurm) > 0
