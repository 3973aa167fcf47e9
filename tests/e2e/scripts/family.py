"""A rank with many data workers, of all the kinds that are hard to find again."""

import os
import signal
import sys
import time
from pathlib import Path

from tests.e2e.scripts.stepping import Steps

folder, children = Path(sys.argv[1]), int(sys.argv[2])
for kind in range(children):
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if kind % 2:
            os.setsid()
        if kind % 4 > 1 and os.fork():
            os._exit(0)
        if kind % 5 == 4:
            os.execve("/bin/sleep", ["sleep", "600"], {})
        time.sleep(600)
        os._exit(0)
Steps().made_one()
while not (folder / "end").exists():
    time.sleep(0.02)
