"""Run by a test: a training that leaves in one of several ways just after it has begun a save."""

import os
import signal
import sys

import torch

from trainer_sdk.checkpoint import Checkpointer


def main() -> None:
    root, way = sys.argv[1:]
    saves = Checkpointer(root, keep_memory=True, job="leaving")
    state = {"a": torch.arange(1 << 20)}
    for step in (1, 2):
        assert saves.save(step, state, wait=True) is not None
    print(saves._queue.writer_pid, saves._saver._readying.arena._folder, flush=True)
    if way == "raise":
        raise KeyError("the training's own")
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
