"""Ranks of another launcher make steps until the file `end` is there.

While there is `hold-RANK`, that rank stays in the section `data`; `stop-RANK` is taken away, and
freezes that rank there; `fail-RANK` is taken away, and ends that rank by an exception.
"""

import os
import signal
import sys
import time
from pathlib import Path

import trainer_sdk


def main(folder: Path, rank: int) -> None:
    run = trainer_sdk.session()
    (folder / f"is-watched-{rank}").write_text(str(run.is_watched))
    while not (folder / "end").exists():
        with run.section("data"):
            time.sleep(0.02)
            while (folder / f"hold-{rank}").exists():
                time.sleep(0.02)
            if (folder / f"stop-{rank}").exists():
                (folder / f"stop-{rank}").unlink()
                os.kill(os.getpid(), signal.SIGSTOP)
        run.step()
        if (folder / f"fail-{rank}").exists():
            (folder / f"fail-{rank}").unlink()
            raise RuntimeError("the loss is not finite")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]))
