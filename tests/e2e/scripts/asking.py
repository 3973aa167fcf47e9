"""A training with torch that asks at each step whether it should stop; then it saves and ends.

While the file `slow` is there, saving takes until it is not; with `ignore` it does not ask.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import trainer_sdk


def worker(folder: Path, rank: int) -> None:
    """A data worker: a signal to the training's group reaches it as well."""
    if os.fork():
        return
    while not (folder / f"saved-{rank}").exists():
        time.sleep(0.02)
    (folder / f"worker-{rank}").write_text("lived")
    os._exit(0)


def main(folder: Path, how: str) -> None:
    dist.init_process_group("gloo")
    rank, total = dist.get_rank(), torch.ones(1)
    saved = folder / f"saved-{rank}"
    if how == "ignore":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        worker(folder, rank)
    with trainer_sdk.session() as run:
        while True:
            dist.all_reduce(total.fill_(1.0))
            # Ranks differ, as those do that write checkpoints or print: no step is like another.
            time.sleep(0.02 + 0.01 * rank)
            step = run.step()
            if (folder / "end").exists():
                break
            if how != "ignore" and run.should_stop:
                break
        while (folder / "slow").exists():
            time.sleep(0.02)
    saved.write_text(str(step))
    if how != "ignore":
        os.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
