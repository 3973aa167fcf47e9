"""A rank that does nothing but say where it is: 20 sections a step, 10 steps a second.

watched.py FOLDER
"""

import json
import os
import sys
import time
from pathlib import Path

import trainer_sdk

SECTIONS = 20
STEP_S = 0.1


def main(folder: Path) -> None:
    run = trainer_sdk.session()
    run.step()
    rank, pid = int(os.environ["RANK"]), os.getpid()
    (folder / f"up.{rank}").write_text(json.dumps(pid))
    due = time.monotonic()
    while True:
        due += STEP_S
        for number in range(SECTIONS):
            with run.section(f"part-{number}"):
                pass
        run.step()
        time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
