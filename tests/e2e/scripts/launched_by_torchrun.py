"""A rank of torchrun, without torch: `launched_by_torchrun.py FOLDER [hangs]`.

In the first round, rank 1 dies, or hangs in a section, once all ranks have begun; later rounds end
well.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import trainer_sdk

LOOK_S = 0.05


def main(folder: Path, fault: str) -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    round_ = len([*folder.glob(f"rank-{rank}-*")]) + 1
    (folder / f"rank-{rank}-{round_}").write_text(store)
    while len([*folder.glob(f"rank-*-{round_}")]) < world:
        threading.Event().wait(LOOK_S)
    if fault == "hangs":
        train(is_stuck=round_ == 1 and rank == "1")
    if round_ == 1:
        if rank == "1" and fault == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


def train(*, is_stuck: bool) -> None:
    """Two steps, with a session that the agent of the node reads."""
    run = trainer_sdk.session()
    for _ in range(2):
        with run.section("forward"):
            run.step()
    if is_stuck:
        with run.section("forward"):
            threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "dies")
