"""Whether memory, descriptors and threads grow from save to save."""

import tempfile
from pathlib import Path

import psutil
import torch

from trainer_sdk.checkpoint import Checkpointer

_BEFORE = 20
MOST = 1.02


def flat(saves: int) -> bool:
    """Says what a rank and its writer have after some saves, and after all."""
    state = {"a": torch.randn(4 << 20), "value": {"lr": 0.1}}
    seen: list[dict[str, float]] = []
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Checkpointer(folder, keep_memory=True, job=Path(folder).name) as one,
    ):
        images = Path(one._saver._preparation.arena.buffers[0].folder).parent
        for step in range(1, saves + 1):
            one.save(step, state)
            one.maybe_finalize(blocking=True, within_s=60)
            for old in sorted(Path(folder).glob("step-*"))[:-1]:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()
            seen.append(used(Path(folder), images))
    first, last = least(seen[:_BEFORE]), least(seen[-_BEFORE:])
    print(f"\nafter {_BEFORE} saves and after {saves}")
    for name, before in first.items():
        word = "flat" if last[name] <= before * MOST else "GROWS"
        print(f"  {name}: {before:.1f} and {last[name]:.1f}: {word}")
    return all(last[name] <= before * MOST for name, before in first.items())


def least(seen: list[dict[str, float]]) -> dict[str, float]:
    """Of the later half: a thread that is about to end does not count as growth."""
    late = seen[len(seen) // 2 :]
    return {name: min(one[name] for one in late) for name in late[0]}


def used(*folders: Path) -> dict[str, float]:
    mine = psutil.Process()
    family = [mine, *mine.children()]
    files = [one for folder in folders for one in folder.rglob("*") if one.is_file()]
    return {
        "resident, MiB": sum(one.memory_info().rss for one in family) / 2**20,
        "in /dev/shm, MiB": sum(one.stat().st_blocks * 512 for one in files) / 2**20,
        "descriptors": sum(one.num_fds() for one in family),
        "threads": sum(one.num_threads() for one in family),
        "processes": len(family),
    }
