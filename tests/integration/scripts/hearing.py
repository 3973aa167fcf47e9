"""Says what it can see of its signals, and what it hears; then it stays.

With `early` it is asked nothing: it says `here`, and waits to be signalled.
"""

import json
import os
import signal
import subprocess
import sys

NAMES = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT")


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def seen() -> list[str]:
    return [str(signal.getsignal(signal.Signals[name])) for name in NAMES]


def blocked() -> list[int]:
    return sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def hear(number: int, _: object) -> None:
    say(heard=number)


if sys.argv[1] == "look":
    at_first = seen()
    before = signal.signal(signal.SIGTERM, hear)
    own = signal.getsignal(signal.SIGTERM) is hear
    back = signal.signal(signal.SIGTERM, before) is hear
    child = subprocess.Popen(["sleep", "600"])
    child.terminate()
    forked = os.fork()
    if forked == 0:
        signal.pause()
    os.kill(forked, signal.SIGTERM)
    say(
        at_first=[text.split(" at ")[0] for text in at_first],
        before=str(before),
        own=own,
        back=back,
        again=str(signal.getsignal(signal.SIGTERM)),
        blocked=blocked(),
        child=child.wait(),
        forked=os.waitpid(forked, 0)[1],
    )
    sys.exit()
if sys.argv[1] == "own":
    for name in NAMES:
        signal.signal(signal.Signals[name], hear)
arrived, arrives = os.pipe()  # `pause` would miss a signal that comes just before it
os.set_blocking(arrives, False)
signal.set_wakeup_fd(arrives)
say(here=True)
while True:
    os.read(arrived, 1)
