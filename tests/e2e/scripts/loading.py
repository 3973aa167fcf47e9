"""A training with data workers that saves: told to stop, it saves once more, and ends.

With `late`, no rank opens its session before the file `open` is there.
"""

import os
import sys
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

import trainer_sdk
from trainer_sdk.checkpoint import Checkpointer


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return count()


def main(folder: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    batches = iter(DataLoader(Numbers(), num_workers=2, prefetch_factor=2))
    (folder / f"waits-{rank}").write_text(str(os.getpid()))
    while how == "late" and not (folder / "open").exists():
        time.sleep(0.02)
    state = {"weights": torch.zeros(1000)}
    with trainer_sdk.session() as run:
        saves = Checkpointer(folder / "saved", every=5)
        found = saves.restore(state)
        step = 0 if found is None else found.step
        (folder / f"restored-{os.environ['EVERSTEP_ROUND']}-{rank}").write_text(str(step))
        run.start_at(step)
        while not run.should_stop:
            next(batches)
            dist.all_reduce(total.fill_(1.0))
            time.sleep(0.02)
            step = run.step()
            state["weights"].fill_(float(step))
            saves.step(step, state)
            if (folder / "end").exists():
                total.zero_()
                break
        saves.save(step, state, wait=True)
        (folder / f"saved-{rank}").write_text(str(step))
        saves.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
