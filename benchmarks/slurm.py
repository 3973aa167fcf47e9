"""What Slurm costs a training: submit, a lost node, and requeues, on a real Slurm of one host.

    python -m benchmarks.slurm
    python -m benchmarks.slurm --rounds 3 --requeues 10

Slurm is started on loopback, without accounting (needs slurmctld, slurmd, munge, and root). Jobs
run by the scripts of `everstep slurm sbatch`, with bus and services inside the allocation. The
training writes down each step, on the clock of the host. `submit`: from sbatch to the first step
of all ranks, two nodes and a spare. `node killed`: from SIGKILL of everything on one node to the
next step of all ranks, with a spare. `requeue`: from `scontrol requeue` to the first step of the
next allocation; Slurm itself holds the job for `cred_expire`, here 5 s. At the end no step of any
allocation may be missing or done twice.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.rig import HEAD, row
from tests.e2e.processes import kill_all, tagged
from tests.e2e.slurm import Slurm, running_slurm, why_not
from tests.e2e.slurm_jobs import steps, submit_training, until_step

_STEPS = 10**6
_BEFORE_FAULT = 30
_BETWEEN_REQUEUES = 5


def main() -> None:
    asked = _asked()
    if reason := why_not():
        sys.exit(f"{reason}: apt-get install slurmctld slurmd slurm-client munge")
    print(HEAD, flush=True)
    with tempfile.TemporaryDirectory(prefix="everstep-slurm-", ignore_cleanup_errors=True) as place:
        folder = Path(place)
        submitted, replaced = [], []
        for number in range(asked.rounds):
            first_s, next_s = _lost_node(_made(folder / f"lost{number}"))
            submitted.append(first_s)
            replaced.append(next_s)
            print(f"  submit {first_s:.2f} s, node killed {next_s:.2f} s", file=sys.stderr)
        if submitted:
            print(row("  submit -> first step", submitted, "s"))
            print(row("  node killed -> next step, a spare", replaced, "s"), flush=True)
        if asked.requeues:
            _requeues(_made(folder / "requeued"), asked.requeues)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of submit and a lost node (5)")
    parser.add_argument("--requeues", type=int, default=50, help="of one job (50)")
    return parser.parse_args()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _lost_node(folder: Path) -> tuple[float, float]:
    try:
        with running_slurm(folder, 3) as slurm:
            began = time.time()
            submit_training(slurm, _STEPS, words=("--nnodes", "2", "--spares", "1"))
            first_s = _first_step_at(slurm, 1, 2) - began
            until_step(slurm, _BEFORE_FAULT, 1, rank=0)
            node = until_step(slurm, _BEFORE_FAULT, 1, rank=1).node
            if node == "n1":  # the batch script and the control plane are there
                node = until_step(slurm, _BEFORE_FAULT, 1, rank=0).node
            struck = time.time()
            slurm.kill_node(node)
            return first_s, _first_step_at(slurm, 2, 2) - struck
    finally:
        kill_all(tagged(folder.name))


def _first_step_at(slurm: Slurm, round_number: int, ranks: int) -> float:
    """When the last rank had made its first step in this round."""
    for rank in range(ranks):
        until_step(slurm, 1, round_number, rank)
    return max(
        next(step.at for step in steps(slurm, rank) if step.round == round_number)
        for rank in range(ranks)
    )


def _requeues(folder: Path, requeues: int) -> None:
    took_s = []
    try:
        with running_slurm(folder, 1) as slurm:
            job = submit_training(slurm, _STEPS)
            for number in range(requeues):
                made = steps(slurm)
                after = (made[-1].number if made else 0) + _BETWEEN_REQUEUES
                until_step(slurm, after, number + 1)
                began = time.time()
                slurm.requeue(job)
                took_s.append(_first_step_at(slurm, number + 2, 1) - began)
                print(f"  requeue {number + 1}: {took_s[-1]:.2f} s", file=sys.stderr, flush=True)
            numbers = [step.number for step in steps(slurm)]
    finally:
        kill_all(tagged(folder.name))
    print(row("  requeue -> first step", took_s, "s"))
    missing = len({*range(1, max(numbers) + 1)} - {*numbers})
    print(
        f"  {requeues} requeues, {max(numbers)} steps: {missing} missing, "
        f"{len(numbers) - len({*numbers})} done twice"
    )


if __name__ == "__main__":
    main()
