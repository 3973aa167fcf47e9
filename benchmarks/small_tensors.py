"""A state of thousands of small tensors: saved and restored, next to torch.distributed.checkpoint.

    python -m benchmarks.small_tensors [--tensors 5000] [--rounds 7]

In turns, in one process, by one rank. What counts is the time for each tensor, not for its bytes.
"""

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from benchmarks.rig import HEAD, row
from trainer_sdk.checkpoint import Checkpointer

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
SHAPES: tuple[tuple[int, ...], ...] = ((), (7,), (3, 5), (2, 3, 4), (64,), (33, 17), (1, 1, 9))
JOB = f"bench-{os.getpid()}"
EACH = 10
"""Tensors of a layer."""
Taken = dict[str, list[float]]


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--tensors", type=int, default=5000)
    made.add_argument("--rounds", type=int, default=7)
    asked = made.parse_args()
    warnings.simplefilter("ignore")  # that it is alone, torch says each time
    os.environ |= {"EVERSTEP_ATTACH": "off"}
    print(f"{asked.tensors} tensors, load {os.getloadavg()[0]:.1f}; milliseconds")
    taken: Taken = {}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        before = psutil.Process().memory_info().rss
        saved(Path(folder), state(asked.tensors, 1), asked.rounds, taken)
        grown = psutil.Process().memory_info().rss - before
        restored(Path(folder), state(asked.tensors, 0), asked.rounds, taken)
        objects = sum(1 for _ in (Path(folder) / "root" / "step-000000001").iterdir())
    print(HEAD)
    for what, values in taken.items():
        print(row(what, values))
    print(f"{objects} files a checkpoint; memory grew by {grown / 2**20:.0f} MiB")


def state(tensors: int, value: int) -> dict[str, Any]:
    """Layers of dictionaries and lists."""

    def tensor(number: int) -> torch.Tensor:
        shape = SHAPES[number // len(DTYPES) % len(SHAPES)]
        return torch.full(shape, value, dtype=DTYPES[number % len(DTYPES)])

    def layer(begin: int) -> dict[str, Any]:
        inside = [tensor(begin + number) for number in range(EACH)]
        return {"weights": inside[:5], "experts": dict(zip("abcde", inside[5:], strict=True))}

    return {"layers": [layer(begin) for begin in range(0, tensors, EACH)], "lr": 0.1}


def saved(folder: Path, found: dict[str, Any], rounds: int, taken: Taken) -> None:
    """The first of ours makes the plan and the memory; dcp plans each time."""
    with Checkpointer(folder / "root", on_error="fatal") as saves:
        for number in range(1, rounds + 2):
            what = "first save" if number == 1 else "save"
            began = time.perf_counter()
            handle = saves.save(number, found)
            note(taken, f"everstep: {what}, the training waits", began)
            assert handle.wait(60)
            note(taken, f"everstep: {what}, until durable", began)
            began = time.perf_counter()
            state_dict_saver.save(found, checkpoint_id=folder / f"dcp-{number}", no_dist=True)
            note(taken, f"dcp.save: {what}", began)
    with Checkpointer(folder / "kept", keep_memory=True, job=JOB) as kept:
        assert kept.save(1, found, wait=True)
        kept._ending.leave(True)  # noqa: FBT003


def restored(folder: Path, live: dict[str, Any], rounds: int, taken: Taken) -> None:
    """Ours also plan the saves to come."""
    for _ in range(rounds):
        with Checkpointer(folder / "root") as saves:
            began = time.perf_counter()
            assert saves.restore(live)
            note(taken, "everstep: restore from the global tier", began)
        kept = Checkpointer(folder / "kept", keep_memory=True, job=JOB)
        began = time.perf_counter()
        assert kept.restore(live)
        note(taken, "everstep: restore from memory", began)
        kept._ending.leave(True)  # noqa: FBT003
        began = time.perf_counter()
        state_dict_loader.load(live, checkpoint_id=folder / "dcp-1", no_dist=True)
        note(taken, "dcp.load", began)
    Checkpointer(folder / "kept", keep_memory=True, job=JOB).close()


def note(taken: Taken, what: str, began: float) -> None:
    taken.setdefault(what, []).append((time.perf_counter() - began) * 1e3)


if __name__ == "__main__":
    main()
