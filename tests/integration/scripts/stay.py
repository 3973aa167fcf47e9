"""Stays, in the way that its arguments name."""

import os
import signal
import sys

how = sys.argv[1]


def note(number: int, _: object) -> None:
    print(f"got {number}", flush=True)


if how == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if how == "ears":
    signal.signal(signal.SIGUSR1, note)
if how == "family":
    for kind in range(int(sys.argv[2])):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if kind % 2:
                os.setsid()
            if kind % 4 > 1 and os.fork():
                os._exit(0)
            if kind % 5 == 4 and "bare" in sys.argv:
                os.execve("/bin/sleep", ["sleep", "600"], {})
            signal.pause()
            os._exit(0)
print("here", flush=True)
while True:
    signal.pause()
