"""The scripts of `everstep slurm sbatch` under a real Slurm: requeues, lost and drained nodes.

Acceptance: A12.3.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import ROOT, SCRIPTS, kill_all, tagged
from tests.e2e.slurm import Slurm, running_slurm, why_not
from tests.waiting import until

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "Slurm is there"),
]
WITHIN_S = 400.0


@pytest.fixture
def slurm(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Slurm]:
    try:
        with running_slurm(tmp_path, nodes=getattr(request, "param", 1)) as slurm:
            yield slurm
    finally:
        kill_all(tagged(tmp_path.name))


def submit(slurm: Slurm, *options: str, words: tuple[str, ...]) -> str:
    """Submit the script as it is written; only drained nodes are looked for more often."""
    script = slurm.folder / "job.sh"
    subprocess.run(
        [
            *(sys.executable, "-m", "everstep_services.cli", "slurm", "sbatch", "--job", "counted"),
            *("--folder", str(slurm.folder), "--write", str(script), *options, "--", *words),
        ],
        check=True,
        env=slurm.environ,
        cwd=ROOT,
        capture_output=True,
    )
    script.write_text(script.read_text().replace("slurm watch", "slurm watch --every 1"))
    return slurm.call("sbatch", "--parsable", f"--chdir={ROOT}", str(script))


def submit_training(slurm: Slurm, steps: int, *options: str, words: tuple[str, ...] = ()) -> str:
    everstep = f"{sys.executable} -m everstep_services.cli"
    training = (str(SCRIPTS / "counted_steps.py"), str(slurm.folder), str(steps), "0.02")
    options = ("--program", everstep, "--control-plane", "inside", *options)
    return submit(slurm, *options, words=(*words, *training))


def submit_agents(slurm: Slurm, body: str, *options: str, words: tuple[str, ...] = ()) -> str:
    """Submit a job whose agents are lines of shell; everything else of the script is real."""
    program = slurm.folder / "everstep"
    other = f'exec {sys.executable} -m everstep_services.cli "$@"'
    program.write_text(f"#!/bin/bash\n[ $1 = run ] || {other}\n{body}\n")
    program.chmod(0o755)
    return submit(slurm, "--program", str(program), *options, words=(*words, "train.py"))


class Step:
    """One line of the training: which step, in which round, and on which node."""

    def __init__(self, line: str) -> None:
        number, round_number, self.node, _ = line.split()
        self.number, self.round = int(number), int(round_number)


def steps(slurm: Slurm, rank: int = 0) -> list[Step]:
    path = slurm.folder / f"steps-{rank}"
    text = path.read_text() if path.exists() else ""
    return [Step(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def until_step(slurm: Slurm, number: int, round_number: int, rank: int = 0) -> Step:
    def reached() -> Step | None:
        made = steps(slurm, rank)
        is_there = made and made[-1].number >= number and made[-1].round >= round_number
        return made[-1] if is_there else None

    return until(reached, f"step {number} of round {round_number}", within_s=WITHIN_S)


def until_codes(slurm: Slurm, *codes: int) -> None:
    """Wait until these allocations have ended."""
    path = slurm.folder / "allocations.jsonl"
    until(
        lambda: [json.loads(line)["code"] for line in path.read_text().splitlines()],
        f"allocations with {codes}",
        holds=list(codes).__eq__,
        despite=(OSError, ValueError),
        within_s=WITHIN_S,
    )


def state(slurm: Slurm, job: str) -> str:
    return slurm.call("squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job}")


def test_a_job_is_requeued_by_its_code_until_it_is_done(slurm: Slurm) -> None:
    """A failure, a preemption, the end: two requeues (A12.3)."""
    job = submit_agents(slurm, "codes=(1 91 0); exit ${codes[${SLURM_RESTART_COUNT:-0}]}")
    until_codes(slurm, 1, 91, 0)
    until(lambda: state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)


def test_a_job_that_must_not_restart_is_not_requeued(slurm: Slurm) -> None:
    job = submit_agents(slurm, "exit 93")
    until(lambda: state(slurm, job), "it has ended", holds="FAILED".__eq__, within_s=WITHIN_S)
    until_codes(slurm, 93)


@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_an_agent_that_ends_early_ends_no_other(slurm: Slurm) -> None:
    """This Slurm has KillOnBadExit=1 and WaitTime=1; the script overrides both (A12.3)."""
    body = f"[ $SLURM_PROCID != 0 ] || exit 137\nsleep 5; touch {slurm.folder}/ended-$SLURM_PROCID"
    job = submit_agents(slurm, body, "--retries", "0", words=("--nnodes", "3"))
    until(lambda: state(slurm, job), "it has ended", holds="FAILED".__eq__, within_s=WITHIN_S)
    until_codes(slurm, 137)
    assert {path.name for path in slurm.folder.glob("ended-*")} == {"ended-1", "ended-2"}


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
    until(lambda: state(slurm, job), "it is done", holds="COMPLETED".__eq__, within_s=WITHIN_S)
    assert [step.number for step in steps(slurm)] == list(range(1, 151))


@pytest.mark.chaos
@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_a_spare_takes_the_place_of_a_lost_node_in_the_allocation(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    lost = until_step(slurm, 30, 1, rank=1)
    slurm.kill_node(lost.node)
    again = until_step(slurm, 20, 2, rank=1)
    assert again.node != lost.node
    assert state(slurm, job) == "RUNNING"


@pytest.mark.chaos
@pytest.mark.parametrize("slurm", [3], indirect=True)
def test_a_drained_node_saves_and_leaves_to_a_spare(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000, words=("--nnodes", "2", "--spares", "1"))
    drained = until_step(slurm, 30, 1, rank=1)
    slurm.call("scontrol", "update", f"NodeName={drained.node}", "State=DRAIN", "Reason=link")
    again = until_step(slurm, 30, 2, rank=1)
    assert again.node != drained.node
    assert state(slurm, job) == "RUNNING"
    numbers = [step.number for step in steps(slurm, rank=1)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.chaos
def test_a_cancelled_job_is_not_requeued(slurm: Slurm) -> None:
    job = submit_training(slurm, 1_000_000)
    until_step(slurm, 5, 1)
    slurm.call("scancel", job)
    until_codes(slurm, 91)
    until(lambda: state(slurm, job), "it has ended", holds="CANCELLED".__eq__, within_s=WITHIN_S)
