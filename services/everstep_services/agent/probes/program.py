"""Runs a program for a check, bounded in time and output; a stuck one is left behind."""

import math
import os
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

_CHUNK = 4096
_KEPT = 1024


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """The result of a program."""

    code: int | None
    """Its exit code, negative for a signal; None if it had not ended in time."""
    output: bytes
    """The beginning of its stdout."""

    @property
    def first_line(self) -> str:
        """The first line that it printed, whatever the encoding."""
        return self.output.partition(b"\n")[0].decode(errors="replace").strip()


class Program:
    """A running program. It stays in the process group of the check, and dies with it."""

    @classmethod
    def start(cls, command: Sequence[str]) -> Self:
        """Start the program. Raises OSError."""
        return cls(
            subprocess.Popen(  # noqa: S603  ourselves, or what the site's settings name
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
            )
        )

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self._output = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, until: float) -> ProgramResult:
        """Wait until it has ended, or the monotonic clock reaches `until`: then it is killed.

        A program that is stuck in the kernel is left there. Its children may hold its output open
        for longer: nobody waits for that.
        """
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            handle = os.pidfd_open(self._process.pid)
            try:
                return self._wait(pipe.fileno(), handle, until)
            finally:
                os.close(handle)

    def _wait(self, pipe: int, handle: int, until: float) -> ProgramResult:
        os.set_blocking(pipe, False)
        watched = select.poll()  # unlike `select`, it takes any number of descriptors
        for descriptor in (pipe, handle):
            watched.register(descriptor, select.POLLIN)
        is_over = False
        while not is_over:
            is_over = time.monotonic() >= until
            left_ms = math.ceil(max(until - time.monotonic(), 0) * 1000)
            ready = {descriptor for descriptor, _ in watched.poll(left_ms)}
            if handle in ready:
                while len(self._output) < _KEPT and self._take(pipe):
                    pass
                return ProgramResult(self._process.wait(), self._output)
            if pipe in ready and not self._take(pipe):
                watched.unregister(pipe)
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # it may take for ever
        return ProgramResult(None, self._output)

    def _take(self, pipe: int) -> bool:
        """Read once and keep the beginning; False at the end, or when nothing is there."""
        try:
            data = os.read(pipe, _CHUNK)
        except BlockingIOError:
            return False
        self._output = (self._output + data)[:_KEPT]
        return bool(data)
