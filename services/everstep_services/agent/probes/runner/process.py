"""The agent's side of a process in which checks run, whatever happens there."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes import registry
from everstep_services.agent.probes.runner import child
from everstep_services.agent.probes.runner.protocol import (
    CheckBegan,
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    ProcessReady,
    Request,
    decode_line,
    encode,
)
from everstep_services.agent.probes.verdicts import worst_first
from everstep_services.agent.ranks import process_tree

log = logging.getLogger(__name__)

_READY_WITHIN_S = 60.0
_MARGIN_S = 1.0
"""How much later than its checks the process may answer."""
_GONE_WITHIN_S = 1.0
_LOOK_S = 0.005
_LAST_WORDS = 512
_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14  # after the command's name in /proc/PID/stat
_LINE_MOST = 1 << 20
_RESULTS_MOST = 256
"""Of each check."""


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """The outcome of one run."""

    results: tuple[CheckResult, ...]
    """The worst first."""
    cpu_s: float
    took_s: float = 0.0
    start_cpu_s: float = 0.0
    """What the start of its process took, if this is its first run."""
    checks: tuple[str, ...] = ()
    """All that ran; `site` only stands for others."""


class _Heard:
    """What the process has reported so far about one request."""

    def __init__(self, names: Sequence[str]) -> None:
        self.open = dict.fromkeys(names)
        """Checks that have not finished."""
        self.seen = dict.fromkeys(names)
        self.results: list[CheckResult] = []
        self.done: ChecksDone | None = None
        self.start_cpu_s = 0.0

    def take(self, line: Line) -> None:
        match line:
            case ProcessReady(cpu_s=cpu_s):
                self.start_cpu_s = cpu_s
            case CheckBegan(check=name):
                self.open[name] = self.seen[name] = None
            case CheckFound(result=result):
                if len(self.results) < _RESULTS_MOST * len(self.seen):
                    self.results.append(result)
            case CheckEnded(check=name):
                self.open.pop(name, None)
            case ChecksDone():
                self.done = line


class ChecksProcess:
    """One process, with a process group of its own, in which everything that checks start stays.

    It starts with its first request. `environ` is given to a process that stays while ranks run;
    another one has our environment, runs one request, and must start within the time of that.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self.is_usable = True
        self.is_gone = False
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._errors: FileIO | None = None
        self._known_cpu_s = 0.0
        self._last_words = ""
        """How it ended, and the last line that it wrote to stderr."""

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def run(self, request: Request, within_s: float) -> ProbeRun:
        """Run checks. One without an answer in time is `unknown`; nothing is raised for it.

        A process that has not answered well is ended, and not usable any more.
        """
        self.is_usable = False
        heard = _Heard(request.names)
        try:
            trouble = await self._answer(heard, request, within_s)
        except TimeoutError:
            trouble = ""
        except OSError as error:
            trouble = f"its process cannot be used: {error.strerror}"
        if heard.done is not None and not heard.open:
            self.is_usable, cpu_s = True, heard.done.cpu_s
        else:  # a thread of it may be stuck, and would take part in the next run
            cpu_s = max(await asyncio.to_thread(self._spent_s) - self._known_cpu_s, 0.0)
            await self.end()
        self._known_cpu_s += cpu_s
        if trouble == _ENDED:
            trouble += f": {self._last_words}"
        for name in heard.open:
            shorter_s = min(registry.deadline_s(name, request.settings), within_s)
            reason = trouble or f"it did not answer within {shorter_s:g} s"
            heard.results.append(CheckResult(check=name, state="unknown", reason=reason))
        if heard.done is not None and heard.done.trouble:
            log.warning("check_notes_lost reason=%r", heard.done.trouble)
        checks = tuple(name for name in heard.seen if name != registry.SITE)
        results, start_cpu_s = worst_first(heard.results), heard.start_cpu_s
        return ProbeRun(results, cpu_s, start_cpu_s=start_cpu_s, checks=checks)

    async def end(self) -> None:
        """Kill it with everything that it has started; if the kernel holds it, leave it there."""
        if self._transport is not None:
            self._transport.close()
        process = self._process
        if process is None or self._last_words:
            self.is_gone = self.is_gone or process is None
            return
        for pipe in filter(None, (process.stdin, process.stdout)):
            pipe.close()
        until, below = time.monotonic() + _GONE_WITHIN_S, set[int]()
        while time.monotonic() < until:
            if process.returncode is None:  # its number is its own until it is reaped
                below |= await asyncio.to_thread(process_tree.kill_tree, process.pid)
            if not self._is_left(below):
                break
            await asyncio.sleep(_LOOK_S)
        self.is_gone = process.returncode is not None
        self._last_words = self._read_last_words(process.returncode)

    def _is_left(self, below: Collection[int]) -> bool:
        """Whether it, or an orphan of it that this subreaper must reap, still dies."""
        assert self._process is not None
        if self._process.poll() is None:
            return True
        try:
            while os.waitid(os.P_PGID, self._process.pid, os.WEXITED | os.WNOHANG):
                pass
        except ChildProcessError:
            return not process_tree.has_reaped(below)
        return True

    async def _answer(self, heard: _Heard, request: Request, within_s: float) -> str:
        """Hear all that is answered; return why there is no good answer, or nothing."""
        until = time.monotonic() + within_s
        if self._process is None:
            try:
                await self._start()
            except OSError as error:
                return f"its process cannot be started: {error.strerror}"
            if self._environ is not None and (trouble := await self._wait_ready(heard)):
                return trouble
        if self._environ is not None:
            until = time.monotonic() + within_s
        async with asyncio.timeout(until + _MARGIN_S - time.monotonic()):
            return await self._ask(heard, encode(msgspec.structs.replace(request, until=until)))

    async def _wait_ready(self, heard: _Heard) -> str:
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                ready = await self._line()
        except TimeoutError:
            return f"its process was not ready within {_READY_WITHIN_S:g} s"
        if ready is None:
            return _ENDED
        heard.take(ready)
        self._known_cpu_s = heard.start_cpu_s
        return ""

    async def _ask(self, heard: _Heard, request: bytes) -> str:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its last words will report why
            await asyncio.to_thread(self._process.stdin.write, request)
        while heard.done is None:
            if (line := await self._line()) is None:
                return _ENDED
            heard.take(line)
        return ""

    async def _start(self) -> None:
        beginning = asyncio.get_running_loop().run_in_executor(None, _begin, self._environ)
        try:
            process, self._errors = await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the thread starts it all the same; `end` must know it
            with contextlib.suppress(OSError):
                self._process, self._errors = await beginning
            raise
        self._process = process
        assert process.stdout is not None
        reader = self._reader = asyncio.StreamReader(limit=_LINE_MOST)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )

    async def _line(self) -> Line | None:
        """The next line that has a meaning; None at the end of its output."""
        assert self._reader is not None
        while True:
            try:
                data = await self._reader.readline()
                return decode_line(data) if data else None
            except (ValueError, msgspec.MsgspecError) as error:
                log.warning("check_line_refused error=%r", str(error))

    def _read_last_words(self, code: int | None) -> str:
        words = b""
        if self._errors is not None:
            size = os.fstat(self._errors.fileno()).st_size
            words = os.pread(self._errors.fileno(), _LAST_WORDS, max(size - _LAST_WORDS, 0))
            self._errors.close()
        lines = words.decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "")
        if code is None:
            return "it cannot be killed"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"{how}. {last}".strip().rstrip(".")

    def _spent_s(self) -> float:
        """The processor time of the process and of everything below it, before they are killed."""
        if self._process is None:
            return 0.0
        below = process_tree.descendants(self._process.pid)
        return sum(_cpu_s(pid) for pid in (self._process.pid, *below))


_ENDED = "its process ended early"
_PROGRAM = child.__name__


def _begin(environ: Mapping[str, str] | None) -> "tuple[subprocess.Popen[bytes], FileIO | None]":
    """Start the process. Blocks for moments; raises OSError.

    Not through asyncio: that reaps a process as soon as it ends, and the number of a group whose
    leader was reaped may belong to another by the time it is killed.
    """
    errors = None
    if environ is None:  # what a process that stays writes would grow without bounds
        errors = os.fdopen(os.memfd_create("checks"), "rb", buffering=0)
    options = [] if environ is None else [child.BESIDE_RANKS]
    try:
        process = subprocess.Popen(  # noqa: S603  ourselves
            [sys.executable, "-P", "-m", _PROGRAM, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL if errors is None else errors,
            bufsize=0,
            process_group=0,
            env=environ,
        )
    except OSError:
        if errors is not None:
            errors.close()
        raise
    return process, errors


def _cpu_s(pid: int) -> float:
    fields = process_tree.stat(pid)
    if len(fields) <= _CSTIME:
        return 0.0
    return _TICKS_S * sum(int(fields[at]) for at in (_UTIME, _STIME, _CUTIME, _CSTIME))
