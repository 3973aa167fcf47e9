"""Rank 1 of the first round stops making progress, in the way that its arguments name."""

import ctypes
import os
import signal
import sys
import threading
import time

import trainer_sdk

kind = sys.argv[1]
run = trainer_sdk.session()
is_first = os.environ["EVERSTEP_ROUND"] == "1" and os.environ["RANK"] == "1"


def hang() -> None:
    match kind:
        case "gil":
            ctypes.PyDLL(None).sleep(1000)  # called without giving the interpreter's lock away
        case "kernel":
            pipe = os.path.join(os.environ["EVERSTEP_RANK_DIR"], "nobody-writes")
            os.mkfifo(pipe)
            # Its child opens that before it starts the program, and nobody writes to it.
            opened = (os.POSIX_SPAWN_OPEN, 0, pipe, os.O_RDONLY, 0)
            os.posix_spawn("/bin/true", ["true"], {}, file_actions=[opened])
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        case "busy":
            while True:
                pass
        case _:
            time.sleep(1000)


if kind == "start" and is_first:
    hang()
for number in range(1, 40):
    with run.section("data"):
        if number == 5 and is_first and kind not in {"outside", "checkpoint"}:
            hang()
        time.sleep(0.01)
    if number == 5 and is_first and kind == "outside":
        hang()
    with run.section("checkpoint"):
        if number == 5 and is_first and kind == "checkpoint":
            hang()
    run.step()
