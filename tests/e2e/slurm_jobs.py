"""Jobs under a test's Slurm, by the scripts of `everstep slurm sbatch`, and what they wrote."""

import json
import sys

from tests.e2e.processes import ROOT, SCRIPTS
from tests.e2e.slurm import Slurm
from tests.waiting import until

WITHIN_S = 400.0


def submit(slurm: Slurm, *options: str, words: tuple[str, ...]) -> str:
    """Submit the script as it is written; only drained nodes are looked for more often."""
    script = slurm.folder / "job.sh"
    slurm.call(
        *(sys.executable, "-m", "everstep_services.cli", "slurm", "sbatch", "--job", "counted"),
        *("--folder", str(slurm.folder), "--write", str(script), *options, "--", *words),
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
        number, round_number, self.node, at = line.split()
        self.number, self.round, self.at = int(number), int(round_number), float(at)


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


def job_state(slurm: Slurm, job: str) -> str:
    return slurm.call("squeue", "--noheader", "--format=%T", "--states=all", f"--jobs={job}")
