"""Whether memory, descriptors and threads grow from save to save."""

import tempfile
from pathlib import Path

import psutil
import torch

from trainer_sdk.checkpoint import Checkpointer

_BEFORE = 20


def flat(saves: int) -> str:
    """A line that says what a rank and its writer have after some saves, and after all."""
    state = {"a": torch.randn(4 << 20), "value": {"lr": 0.1}}
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as folder,
        Checkpointer(folder, keep_memory=True, job="flat") as one,
    ):
        seen = []
        for step in range(1, saves + 1):
            one.save(step, state)
            one.maybe_finalize(blocking=True, within_s=60)
            for old in sorted(Path(folder).glob("step-*"))[:-1]:
                for file in old.iterdir():
                    file.unlink()
                old.rmdir()
            if step in (_BEFORE, saves):
                seen.append(used())
    (rss, shm, fds, threads), last = seen[0], seen[-1]
    return (
        f"\nafter {_BEFORE} saves and after {saves}: resident {rss:.1f} and {last[0]:.1f} MiB, "
        f"/dev/shm {shm:.1f} and {last[1]:.1f} MiB, descriptors {fds} and {last[2]}, "
        f"threads {threads} and {last[3]}"
    )


def used() -> tuple[float, float, int, int]:
    mine = psutil.Process()
    family = [mine, *mine.children()]
    return (
        sum(one.memory_info().rss for one in family) / 2**20,
        psutil.disk_usage("/dev/shm").used / 2**20,
        sum(one.num_fds() for one in family),
        sum(one.num_threads() for one in family),
    )
