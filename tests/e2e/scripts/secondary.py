"""Ranks that meet at every step until one of them raises, and the others lose their connections.

It is the one whose file `raise-RESTART-RANK` is there. With `closing` each closes its connections
before the exception has ended its script, as trainings do that leave their process group at last.
"""

import os
import sys
import time
from pathlib import Path

from tests.e2e.scripts.meeting import Meeting
from tests.e2e.scripts.stepping import Steps

_CLOSES_S = 0.1


def train(meeting: Meeting, restart: int, raises: Path) -> None:
    steps = Steps(1000 * restart)
    while meeting.step(go_on=not raises.with_name("end").exists()):
        steps.made_one()
        if raises.exists():
            raise ValueError("the root cause")
        time.sleep(0.02)


def main(folder: Path, is_closing: bool) -> None:
    meeting, restart = Meeting(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    try:
        train(meeting, restart, folder / f"raise-{restart}-{meeting.rank}")
    finally:
        if is_closing:
            meeting.close()
            time.sleep(_CLOSES_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), "closing" in sys.argv[2:])
