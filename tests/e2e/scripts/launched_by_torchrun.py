"""A rank of torchrun, without torch: `launched_by_torchrun.py FOLDER`.

In the first round, rank 1 dies once all ranks have begun; later rounds end well.
"""

import os
import signal
import sys
import threading
from pathlib import Path

LOOK_S = 0.05


def main(folder: Path) -> None:
    rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
    store = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    round_ = len([*folder.glob(f"rank-{rank}-*")]) + 1
    (folder / f"rank-{rank}-{round_}").write_text(store)
    while len([*folder.glob(f"rank-*-{round_}")]) < world:
        threading.Event().wait(LOOK_S)
    if round_ == 1:
        if rank == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
