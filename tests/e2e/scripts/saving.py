"""Told that the node goes, it saves at the end of the step and leaves the loop.

It says all that it has heard. With `all` its data worker does not listen to signals, and the rank
goes on until the file `sent` is there: the signal has then been sent to every process.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.e2e.scripts.meeting import Meeting
from tests.e2e.scripts.stepping import OptimizerSteps

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
heard: list[str] = []


def hear(number: int, _: object) -> None:
    heard.append(signal.Signals(number).name)


def work() -> None:
    """A data worker: it has its parent's handlers, and nothing to save."""
    while not (folder / f"saved-{rank}").exists():
        time.sleep(0.02)
    if heard:
        (folder / f"worker-{rank}").write_text(heard[0])
    os._exit(0)


for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
worker = os.fork()
if worker == 0:
    if "all" in sys.argv:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
    work()
steps, meeting = OptimizerSteps(), Meeting()
while not heard or ("all" in sys.argv and not (folder / "sent").exists()):
    steps.made_one()
    time.sleep(0.02)
meeting.step(go_on=True)
(folder / f"saved-{rank}").write_text(" ".join(heard))
os.waitpid(worker, 0)
