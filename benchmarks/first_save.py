"""What the first save of a training costs its step, and the later ones.

Each run is a process of its own, from scratch, with an Adam whose state is made by the first
step. The limit is the copy: the same bytes, into memory that is there.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

EVERY = 6
SAVES = 2


def run(mib: int, step_s: float) -> None:
    """One training; it prints the seconds of each call that saves, and of a copy."""
    from trainer_sdk.checkpoint import Checkpointer

    weights = torch.nn.Parameter(torch.ones(mib << 20 >> 4, dtype=torch.float32))  # and two of Adam
    other = torch.ones(mib << 20 >> 4, dtype=torch.float32)
    optimizer = torch.optim.Adam([weights], lr=1e-3)
    weights.grad = torch.ones_like(weights)
    state = {"weights": weights, "optimizer": optimizer, "other": other}
    stalls: list[float] = []
    others: list[float] = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        saves = Checkpointer(root, every=EVERY, job="first-save", lazy=False)
        saves.restore(state)
        for step in range(1, SAVES * EVERY + 1):
            if step == 1:
                optimizer.step()
            time.sleep(step_s)  # what a GPU does meanwhile
            called = time.perf_counter()
            saves.step(step, state)
            (stalls if step % EVERY == 0 else others).append(time.perf_counter() - called)
            if step % EVERY == EVERY - 1:
                saves.maybe_finalize(blocking=True)
        saves.close()
    copied = torch.empty_like(other)
    copied.copy_(other)
    began = time.perf_counter()
    for _ in range(4):
        copied.copy_(other)
    copy_s = time.perf_counter() - began
    print(json.dumps({"stalls": stalls, "others": max(others), "copy": copy_s}))


def main() -> None:
    """`runs` runs, and their medians."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--mib", type=int, default=1024, help="of the state")
    asked.add_argument("--runs", type=int, default=5)
    asked.add_argument("--step-s", type=float, default=0.2)
    asked.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = asked.parse_args()
    if given.one:
        run(given.mib, given.step_s)
        return
    found = []
    for _ in range(given.runs):
        done = subprocess.run(
            [
                *[sys.executable, "-m", "benchmarks.first_save", "--one"],
                *[f"--mib={given.mib}", f"--step-s={given.step_s}"],
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[1],
        )
        found.append(json.loads(done.stdout))
    for name, values in {
        "first save": [one["stalls"][0] for one in found],
        "later saves": [stall for one in found for stall in one["stalls"][1:]],
        "longest call that saves nothing": [one["others"] for one in found],
        "limit: a copy": [one["copy"] for one in found],
    }.items():
        low, high = min(values), max(values)
        print(
            f"{name:32} {statistics.median(values):7.3f} s  ({low:.3f} … {high:.3f}, {len(values)})"
        )


if __name__ == "__main__":
    main()
