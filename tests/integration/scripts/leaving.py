"""Run by a test: a training that leaves in one of several ways just after it has begun a save.

`leaving.py ROOT WAY ON_ERROR STORAGE`; after the first save its storage works, fails, hangs or
freezes.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import torch

from trainer_sdk.checkpoint import Checkpointer, Timeouts
from trainer_sdk.checkpoint.save.request import OnError


def main(root: Path, way: str, on_error: OnError, storage: str) -> None:
    saves = Checkpointer(
        root,
        keep_memory=True,
        job=f"leaving-{os.getpid()}",
        on_error=on_error,
        timeouts=Timeouts(exit_within_s=1.0 if storage in ("hangs", "freezes") else 40.0),
    )
    signal.signal(signal.SIGTERM, leave)
    state = {"a": torch.arange(1 << 20)}
    assert saves.save(1, state, wait=True).durable
    writer = saves._queue.writer_pid
    print(writer, saves._saver._preparation.arena.folder, flush=True)
    if storage == "fails":
        root.rename(root.with_name("away"))
        root.touch()
    if storage == "hangs":
        assert writer is not None
        os.kill(writer, signal.SIGSTOP)
    if storage == "freezes":
        subprocess.run(["fsfreeze", "--freeze", root.parent], check=True)
    assert saves.save(2, state)
    match way:
        case "raise":
            raise KeyError("the training's own")
        case "exit":
            sys.exit(3)
        case "terminated":
            signal.raise_signal(signal.SIGTERM)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case _:
            return


def leave(*_: object) -> NoReturn:
    sys.exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], sys.argv[4])  # type: ignore[arg-type]
