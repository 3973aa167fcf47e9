"""Lets a user into the server that runs beside a folder, and proves it by logging in.

That a user stands in the configuration says little: the server may have died before it read it
again, or whoever wrote it may have been stopped before telling it.
"""

import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from everstep.bus.errors import BusConfigError
from everstep.bus.login import read_secret
from everstep.bus.serverconfig import admit, password_file

_ANSWER_WITHIN_S = 5.0
_AGAIN_AFTER_S = 1.0


class Admission:
    """One user's. Ask again and again, a little apart: each call blocks, but not for long."""

    def __init__(self, folder: Path, url: str, name: str) -> None:
        parts = urlsplit(url)
        self._folder = folder
        self._address = (parts.hostname or "127.0.0.1", parts.port or 4222)
        self._name = name
        self._again_at = 0.0

    def is_let_in(self) -> bool:
        """Whether the server lets the user in; where it does not, it is told to, once a second."""
        if self._logs_in():
            return True
        if time.monotonic() >= self._again_at:
            admit(self._folder / "nats.json", self._folder, self._name)
            _let_read_again(self._folder)
            self._again_at = time.monotonic() + _AGAIN_AFTER_S
        return False

    def _logs_in(self) -> bool:
        try:
            password = read_secret(password_file(self._folder, self._name), "password_file")
            with (
                socket.create_connection(self._address, timeout=_ANSWER_WITHIN_S) as link,
                link.makefile("rb") as said,
            ):
                said.readline()  # what it is
                link.sendall(_hello(self._name, password))
                answers = (line for line in said if line.startswith((b"PONG", b"-ERR")))
                return next(answers, b"").startswith(b"PONG")
        except (OSError, BusConfigError):  # it is away, or the user has no password yet
            return False


def _hello(user: str, password: str) -> bytes:
    login = {"user": user, "pass": password, "name": "admission", "verbose": False}
    return b"CONNECT " + msgspec.json.encode(login) + b"\r\nPING\r\n"


def _let_read_again(folder: Path) -> None:
    """Send SIGHUP to the server whose ports file is there, and to nothing else.

    A killed server leaves its file until the next one starts.
    """
    for path in folder.glob("*.ports"):
        program, _, pid = path.stem.rpartition("_")
        with suppress(OSError, ValueError):
            handle = os.pidfd_open(int(pid))
            try:
                # Read after the handle was taken: now the pid cannot become another process.
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
                if Path(os.fsdecode(command.partition(b"\0")[0])).name == program:
                    signal.pidfd_send_signal(handle, signal.SIGHUP)
            finally:
                os.close(handle)
