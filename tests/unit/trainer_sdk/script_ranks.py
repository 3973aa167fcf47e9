"""Helpers: a rank with a page and a socket as its agent makes them, and a script of the test."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from trainer_sdk import layout
from trainer_sdk.page import PageView, make_page
from trainer_sdk.page_content import PageReading
from trainer_sdk.wire import Datagram

ROUND, RANK = 7, 3


class ScriptRank:
    """A page and a socket, without the bootstrap: the script's session finds them itself."""

    def __init__(self, folder: Path, wire: socket.socket) -> None:
        self.page: PageView = make_page(str(folder / "page"))
        self._wire = wire
        self.environ = {
            **os.environ,
            layout.PAGE_VARIABLE: str(folder / "page"),
            layout.SOCKET_VARIABLE: str(folder / "socket"),
            layout.ROUND_VARIABLE: str(ROUND),
            "RANK": str(RANK),
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [sys.executable, *arguments],
            env=self.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str) -> str:
        """Run the script, and return its output; it must succeed without output on stderr."""
        return self.finish("-c", script)

    def finish(self, *arguments: str) -> str:
        """As `script`, for any arguments of Python."""
        with self.start(*arguments) as process:
            out, err = process.communicate(timeout=50)
        assert (process.returncode, err) == (0, "")
        return out

    @property
    def reading(self) -> PageReading:
        reading = self.page.read()
        assert reading is not None
        return reading

    def counts(self) -> dict[str, int]:
        return {one.name: one.count for one in self.page.sections() if one.name}

    def messages(self) -> list[Datagram]:
        decoder = msgspec.json.Decoder[Datagram](Datagram)
        found = []
        while True:
            try:
                found.append(decoder.decode(self._wire.recv(4096)))
            except BlockingIOError:
                return found


@contextmanager
def script_rank(folder: Path) -> Iterator[ScriptRank]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as wire:
        here = os.open(folder, os.O_PATH)
        wire.bind(f"/proc/self/fd/{here}/socket")
        os.close(here)
        rank = ScriptRank(folder, wire)
        yield rank
        rank.page.close()
