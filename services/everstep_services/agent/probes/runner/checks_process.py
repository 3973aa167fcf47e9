"""The process of an examination, from the side of its parent."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from io import FileIO
from typing import Self

import msgspec

from everstep_services.agent.probes.runner.protocol import (
    ChecksDone,
    Line,
    Request,
    decode_line,
    encode,
)

log = logging.getLogger(__name__)

_CHILD = "everstep_services.agent.probes.runner.child"
_LOOKS_FOR_ITS_END, _LOOK_S = 200, 0.005
_LAST_WORDS = 512


class ChecksProcess:
    """One process, with a process group of its own, in which everything that checks start stays."""

    @classmethod
    def begin(cls, request: Request) -> Self:
        """Start it, and send the request. Blocks for moments; raises OSError.

        Not through asyncio: that reaps a process as soon as it ends, and the number of a group
        whose
        leader was reaped may belong to another by the time it is killed.
        """
        errors = os.fdopen(os.memfd_create("checks"), "rb", buffering=0)
        try:
            process = subprocess.Popen(  # noqa: S603  ourselves
                [sys.executable, "-P", "-m", _CHILD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                process_group=0,
            )
        except OSError:
            errors.close()
            raise
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `last_words` will report why
            process.stdin.write(encode(request))
        return cls(process, errors)

    def __init__(self, process: "subprocess.Popen[bytes]", errors: FileIO) -> None:
        self._process = process
        self._errors = errors
        self.last_words = ""
        """How it ended, and the last line that it wrote to stderr."""

    async def listen(self, hear: Callable[[Line], None]) -> None:
        """Yield its lines until it is done, or has ended."""
        assert self._process.stdout is not None
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            async for data in reader:
                try:
                    line = decode_line(data)
                except msgspec.MsgspecError as error:
                    log.warning("check_line_refused error=%r", str(error))
                    continue
                hear(line)
                if isinstance(line, ChecksDone):
                    return
        finally:
            transport.close()

    async def end(self) -> None:
        """Kill it with everything that it has started; if the kernel holds it, leave it there."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for _ in range(_LOOKS_FOR_ITS_END):
            if not self._is_left():
                break
            await asyncio.sleep(_LOOK_S)
        self.last_words = self._read_last_words()
        self._errors.close()

    def _is_left(self) -> bool:
        """Whether it, or an orphan of it that this subreaper must reap, still dies."""
        if self._process.poll() is None:
            return True
        try:
            while os.waitid(os.P_PGID, self._process.pid, os.WEXITED | os.WNOHANG):
                pass
        except ChildProcessError:
            return False
        return True

    def _read_last_words(self) -> str:
        code = self._process.returncode
        if code is None:
            return "it cannot be killed"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), _LAST_WORDS, max(size - _LAST_WORDS, 0))
        lines = said.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}. {last}".strip().rstrip(".")
