"""Runs a writer for the rank that has started it: `python -m trainer_sdk.checkpoint.writer FD`."""

import ctypes
import itertools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from trainer_sdk.bootstrap.deferred_signals import HELD
from trainer_sdk.checkpoint.writer.protocol import FromWriter, ToWriter
from trainer_sdk.checkpoint.writer.service import WriterService
from trainer_sdk.wire import Channel

_PR_SET_PDEATHSIG = 1
_NICER = 10
KILL_AT = "EVERSTEP_CHECKPOINT_KILL_AT"
_POINTS = ("open", "write", "pwrite", "fsync", "link", "rename", "replace", "unlink", "rmdir")


def arm(environ: Mapping[str, str]) -> None:
    """For tests: kill this process before its n-th file call, if the environment has n."""
    if KILL_AT not in environ:
        return
    counter, last = itertools.count(1), int(environ[KILL_AT])
    for name in _POINTS:
        setattr(os, name, _counted(getattr(os, name), counter, last))


def _counted(call: Callable[..., Any], counter: "itertools.count[int]", last: int) -> Any:
    def counted(*arguments: Any, **named: Any) -> Any:
        if next(counter) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return counted


def main() -> None:
    """Work until the rank is gone."""
    parent = int(sys.argv[2])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        return
    for number in (*HELD, signal.SIGQUIT):
        signal.signal(
            number, signal.SIG_IGN
        )  # they are meant for the rank, which waits for its last save
    os.nice(_NICER)
    arm(os.environ)
    channel: Channel[ToWriter] = Channel(socket.socket(fileno=int(sys.argv[1])), ToWriter)
    sending = threading.Lock()

    def send(line: FromWriter) -> None:
        with sending:
            channel.send(line)

    service = WriterService(send)
    try:
        while True:
            for order in channel.receive():
                service.take(order)
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
