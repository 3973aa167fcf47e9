"""The scripts of `everstep slurm sbatch` under a real Slurm: requeues, lost and drained nodes.

Acceptance: A12.3.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import kill_all, tagged
from tests.e2e.slurm import Slurm, running_slurm, why_not
from tests.e2e.slurm_jobs import (
    WITHIN_S,
    job_state,
    steps,
    submit_agents,
    submit_training,
    until_codes,
    until_step,
)
from tests.variants import variant
from tests.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]


@pytest.fixture
def settings() -> str:
    """Further lines of slurm.conf; a test overrides them by a parameter."""
    return ""


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest, settings: str) -> Iterator[Slurm]:
    try:
        with running_slurm(tmp_path, getattr(request, "param", 1), settings) as slurm:
            yield slurm
    finally:
        kill_all(tagged(tmp_path.name))


def test_a_job_is_requeued_by_its_code_until_it_is_done(slurm: Slurm) -> None:
    """A failure, a preemption, the end: two requeues (A12.3)."""
    job = submit_agents(slurm, "codes=(1 91 0); exit ${codes[${SLURM_RESTART_COUNT:-0}]}")
    until_codes(slurm, 1, 91, 0)
    until(lambda: job_state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)


def test_a_job_that_must_not_restart_is_not_requeued(slurm: Slurm) -> None:
    job = submit_agents(slurm, "exit 93")
    until(lambda: job_state(slurm, job), "it has ended", holds="FAILED".__eq__, within_s=WITHIN_S)
    until_codes(slurm, 93)


@pytest.mark.parametrize(
    "settings",
    [
        "",
        *(variant(f"KillOnBadExit={kill}\nWaitTime={wait}") for kill in (0, 1) for wait in (0, 30)),
    ],
)
@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_an_agent_that_ends_early_ends_no_other(slurm: Slurm) -> None:
    """The script overrides KillOnBadExit and WaitTime, 1 unless `settings` differ (A12.3)."""
    body = f"[ $SLURM_PROCID != 0 ] || exit 137\nsleep 5; touch {slurm.folder}/ended-$SLURM_PROCID"
    job = submit_agents(slurm, body, "--retries", "0", words=("--nnodes", "3"))
    until(lambda: job_state(slurm, job), "it has ended", holds="FAILED".__eq__, within_s=WITHIN_S)
    until_codes(slurm, 137)
    assert {path.name for path in slurm.folder.glob("ended-*")} == {"ended-1", "ended-2"}


@pytest.mark.parametrize("settings", ["KillOnBadExit=1\nWaitTime=0", "KillOnBadExit=0\nWaitTime=1"])
@pytest.mark.parametrize("slurm", [2], indirect=True)
def test_without_the_options_of_the_script_slurm_ends_all_agents(slurm: Slurm) -> None:
    """Each of the two settings alone would end the others: the test above can fail (A12.3)."""
    begun, ended = slurm.folder / "begun", slurm.folder / "ended"
    first = f"until [ -e {begun} ]; do sleep 0.1; done; exit 137"
    agent = f"[ $SLURM_PROCID != 0 ] || {{ {first}; }}; touch {begun}; sleep {WITHIN_S}"
    # The shell may outlive its `sleep` by a moment: only a sleep that was not killed counts.
    step = slurm.start(
        *("srun", "--nodes=2", "--ntasks-per-node=1"), *("bash", "-c", f"{agent} && touch {ended}")
    )
    assert step.wait() in {137, 143}  # the highest code of both tasks
    assert begun.exists()
    assert not ended.exists()


def test_the_rest_of_a_chain_is_cancelled_when_the_job_is_done(slurm: Slurm) -> None:
    codes = "codes=(- 92 0); exit ${codes[$SLURM_ARRAY_TASK_ID]}"
    job = submit_agents(slurm, codes, "--chain", "4")
    until_codes(slurm, 92, 0)
    until(
        lambda: slurm.call("squeue", "--noheader", f"--jobs={job}"),
        "no allocation is left",
        holds="".__eq__,
        within_s=WITHIN_S,
    )


@pytest.mark.chaos
def test_a_requeued_job_does_each_step_once_and_is_done(slurm: Slurm) -> None:
    """No step is lost or done twice, and the job that is done is not requeued."""
    job = submit_training(slurm, 150)
    until_step(slurm, 5, 1)
    slurm.requeue(job)
    until_step(slurm, 150, 2)
    until(lambda: job_state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)
    assert [step.number for step in steps(slurm)] == list(range(1, 151))


@pytest.mark.chaos
@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_a_spare_takes_the_place_of_a_lost_node_in_the_allocation(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    lost = until_step(slurm, 30, 1, rank=1)
    slurm.kill_node(lost.node)
    again = until_step(slurm, 20, 2, rank=1)
    assert again.node != lost.node
    assert job_state(slurm, job) == "RUNNING"


@pytest.mark.chaos
@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_a_drained_node_saves_and_leaves_to_a_spare(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    drained = until_step(slurm, 30, 1, rank=1)
    slurm.call("scontrol", "update", f"NodeName={drained.node}", "State=DRAIN", "Reason=link")
    again = until_step(slurm, 30, 2, rank=1)
    assert again.node != drained.node
    assert job_state(slurm, job) == "RUNNING"
    numbers = [step.number for step in steps(slurm, rank=1)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.chaos
def test_a_cancelled_job_is_not_requeued(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000)
    until_step(slurm, 5, 1)
    slurm.call("scancel", job)
    until_codes(slurm, 91)
    until(
        lambda: job_state(slurm, job), "it has ended", holds="CANCELLED".__eq__, within_s=WITHIN_S
    )


_REQUEUES = 50


@pytest.mark.chaos
@pytest.mark.variant
@pytest.mark.timeout(7200)
def test_fifty_requeues_lose_no_step_and_do_none_twice(slurm: Slurm) -> None:
    """Each allocation continues at the step after the last one of the allocation before (A12.3)."""
    job = submit_training(slurm, 1_000_000)
    for number in range(_REQUEUES):
        made = steps(slurm)
        until_step(slurm, (made[-1].number if made else 0) + 5, number + 1)
        slurm.requeue(job)
    made = steps(slurm)
    until_step(slurm, made[-1].number + 5, _REQUEUES + 1)
    numbers = [step.number for step in steps(slurm)]
    assert numbers == list(range(1, len(numbers) + 1))
