"""Examines this node in a process of its own, within a time limit, whatever happens there."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.runner.protocol import (
    CheckBegan,
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    Request,
    decode_line,
    encode,
)
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination, worst_first
from everstep_services.agent.ranks import process_tree

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
        below = await asyncio.to_thread(process_tree.kill_tree, self._process.pid)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        for _ in range(_LOOKS_FOR_ITS_END):
            if not self._is_left(below):
                break
            await asyncio.sleep(_LOOK_S)
        self.last_words = self._read_last_words()
        self._errors.close()

    def _is_left(self, below: Collection[int]) -> bool:
        """Whether it, or an orphan of it that this subreaper must reap, still dies."""
        if self._process.poll() is None:
            return True
        try:
            while os.waitid(os.P_PGID, self._process.pid, os.WEXITED | os.WNOHANG):
                pass
        except ChildProcessError:
            return not process_tree.has_reaped(below)
        return True

    def _read_last_words(self) -> str:
        code = self._process.returncode
        if code is None:
            return "it cannot be killed"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        size = os.fstat(self._errors.fileno()).st_size
        words = os.pread(self._errors.fileno(), _LAST_WORDS, max(size - _LAST_WORDS, 0))
        lines = words.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        return f"{how}. {last}".strip().rstrip(".")


_DONE_WITHIN_S = 0.5
"""How much later than its checks the process may send its last line."""


@dataclass(frozen=True, slots=True)
class NodeExaminer:
    """Examines this node. No failure of a check is raised here."""

    settings: ChecksSettings
    notes: Path | None = None
    """The file for the notes of checks, for this node alone."""
    root: Path = Path("/")

    async def examine(
        self,
        names: Sequence[str],
        occasion: str,
        *,
        within_s: float | None = None,
        own_pids: Collection[int] = (),
    ) -> NodeExamination:
        """Run these checks in parallel. A check that has not answered in time is `unknown`.

        On cancellation it leaves no process behind.
        """
        began = time.monotonic()
        limit_s = self.settings.all_within_s if within_s is None else within_s
        heard = _Heard(tuple(names))
        request = Request(
            names=tuple(names),
            settings=self.settings,
            notes=self.notes,
            until=began + limit_s,
            root=self.root,
            own_pids=tuple(own_pids),
        )
        ending = await _carry_out(request, heard)
        for name in heard.open:
            heard.results.append(self._unanswered(name, ending, limit_s))
        if heard.trouble:
            log.warning("check_notes_lost reason=%r", heard.trouble)
        took_s = round(time.monotonic() - began, 3)
        return NodeExamination(occasion, heard.checks, worst_first(heard.results), took_s)

    def _unanswered(self, name: str, ending: str, limit_s: float) -> CheckResult:
        shorter_s = min(registry.deadline_s(name, self.settings), limit_s)
        reason = ending or f"it did not answer within {shorter_s:g} s"
        return CheckResult(check=name, state="unknown", reason=reason)


class _Heard:
    """What the process has reported so far."""

    def __init__(self, names: Sequence[str]) -> None:
        self.open = dict.fromkeys(names)
        """Checks that have not finished."""
        self.results: list[CheckResult] = []
        self.is_done = False
        self.trouble = ""
        self._seen = dict.fromkeys(names)

    def take(self, line: Line) -> None:
        match line:
            case CheckBegan(check=name):
                self.open[name] = self._seen[name] = None
            case CheckFound(result=result):
                self.results.append(result)
            case CheckEnded(check=name):
                self.open.pop(name, None)
            case ChecksDone(trouble=trouble):
                self.is_done, self.trouble = True, trouble

    @property
    def checks(self) -> tuple[str, ...]:
        """All that ran; `site` only stands for others."""
        return tuple(name for name in self._seen if name != registry.SITE)


async def _carry_out(request: Request, heard: _Heard) -> str:
    """Run it; return why the process failed, if that is why checks have not answered."""
    loop = asyncio.get_running_loop()
    beginning = loop.run_in_executor(None, ChecksProcess.begin, request)
    try:
        process = await asyncio.shield(beginning)
    except asyncio.CancelledError:  # the thread starts it all the same
        with contextlib.suppress(OSError):
            await (await beginning).end()
        raise
    except OSError as error:
        return f"its process cannot be started: {error.strerror}"
    until = loop.time() + request.until - time.monotonic() + _DONE_WITHIN_S
    try:
        async with asyncio.timeout_at(until):
            await process.listen(heard.take)
    except TimeoutError:
        return ""
    finally:
        await process.end()
    return "" if heard.is_done else f"its process ended early: {process.last_words}"
