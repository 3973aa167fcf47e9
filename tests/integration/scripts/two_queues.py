"""Run by a test: a training that ends while three queues still have a save on its way.

`two_queues.py FOLDER HOW`; one of the two `Checkpointer`s works, and the other one `works`, `fails`
or `hangs`. Nobody closes anything.
"""

import os
import signal
import sys
from pathlib import Path

import torch

from trainer_sdk.checkpoint import Checkpointer, Timeouts, async_save


def main(folder: Path, how: str) -> None:
    timeouts = Timeouts(exit_within_s=1.0 if how == "hangs" else 40.0)
    other = Checkpointer(folder / "other", on_error="retry", timeouts=timeouts)
    works = Checkpointer(folder / "works", on_error="retry")
    if how == "fails":
        (folder / "other").touch()
    if how == "hangs":
        writer = other._queue.writer_pid
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
    assert other.save(1, {"a": torch.full((1 << 20,), 1.0)})
    assert works.save(1, {"a": torch.full((1 << 20,), 2.0)})
    assert async_save({"a": torch.full((1 << 20,), 3.0)}, folder / "file.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
