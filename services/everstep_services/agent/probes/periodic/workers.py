"""The agent's side of the processes in which probes run."""

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.periodic import worker as worker_module
from everstep_services.agent.probes.runner.protocol import (
    CheckEnded,
    CheckFound,
    ChecksDone,
    Line,
    Request,
    decode_line,
    encode,
)
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import worst_first
from everstep_services.agent.ranks import process_tree
from everstep_services.agent.runtime.rank_environment import without_logins

log = logging.getLogger(__name__)

_READY_WITHIN_S = 60.0
_MARGIN_S = 1.0
"""How much later than its probe the process may answer."""
_GONE_WITHIN_S = 1.0
_LOOK_S = 0.01
_TICKS_S = 1.0 / os.sysconf("SC_CLK_TCK")
_UTIME, _STIME, _CUTIME, _CSTIME = 11, 12, 13, 14  # after the command's name in /proc/PID/stat
_LINE_MOST = 1 << 20
_RESULTS_MOST = 256


@dataclass(frozen=True, slots=True)
class ProbeRun:
    """The outcome of one run."""

    results: tuple[CheckResult, ...]
    """The worst first."""
    cpu_s: float
    took_s: float = 0.0
    start_cpu_s: float = 0.0
    """What the start of its process took, if it is one of the first, which any probe needs."""
    is_left: bool = False
    """The run ended with its process, which the kernel still holds."""


class ProbeWorkers:
    """At most `most` processes, each for one probe at a time; they stay for the next probes."""

    def __init__(self, settings: ChecksSettings, notes: Path | None, root: Path, most: int) -> None:
        self._settings = settings
        self._notes = notes
        self._root = root
        self._idle: list[_Worker] = []
        self._room = asyncio.Semaphore(most)
        self._starts_free = most
        self._left: dict[str, int] = {}
        """For each probe, its last process, if that could not be killed."""

    async def run(self, name: str, within_s: float, own_pids: Collection[int] = ()) -> ProbeRun:
        """Run one check. A run without an answer in time is `unknown`; nothing is raised for it."""
        began = time.monotonic()
        async with self._room:
            left = self._left.get(name)
            if left is not None and await asyncio.to_thread(_is_there, left):
                return _unknown(name, f"its last run has not ended: process {left} is stuck")
            self._left.pop(name, None)
            worker = self._idle.pop() if self._idle else self._new()
            request = Request(
                names=(name,),
                settings=self._settings,
                notes=self._notes,
                until=0.0,
                root=self._root,
                own_pids=tuple(own_pids),
            )
            try:
                run = await worker.run(name, request, within_s)
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    await worker.end()
            if not worker.is_usable and not worker.is_gone:
                self._left[name] = worker.pid
                run = replace(run, is_left=True)
        return replace(run, took_s=round(time.monotonic() - began, 4))

    def _new(self) -> "_Worker":
        """A process that replaces one that a probe has spoiled is paid for by its probe."""
        self._starts_free -= 1
        return _Worker(is_start_free=self._starts_free >= 0)

    async def end(self) -> None:
        """End all processes that run no probe."""
        while self._idle:
            await self._idle.pop().end()


class _Worker:
    """One process, with a process group of its own, from its first probe on."""

    def __init__(self, *, is_start_free: bool) -> None:
        self._is_start_free = is_start_free
        self.is_usable = True
        self.is_gone = False
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._transport: asyncio.ReadTransport | None = None
        self._known_cpu_s = self._run_cpu_s = self._start_cpu_s = 0.0
        self._has_ended = False
        self._results: list[CheckResult] = []

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    async def run(self, name: str, request: Request, within_s: float) -> ProbeRun:
        """Run one probe; a process that has not answered well is not usable any more."""
        self.is_usable = False
        self._results.clear()
        self._start_cpu_s = 0.0
        try:
            trouble = await self._answer(name, request, within_s)
        except TimeoutError:
            trouble = f"it did not answer within {within_s:g} s"
        except OSError as error:
            trouble = f"its process cannot be used: {error.strerror}"
        if trouble:
            unknown = CheckResult(check=name, state="unknown", reason=trouble)
            spent_s = await asyncio.to_thread(self._spent_s)
            return ProbeRun(
                worst_first([*self._results, unknown]), max(spent_s - self._known_cpu_s, 0.0)
            )
        self.is_usable = True
        cpu_s = self._run_cpu_s
        if self._is_start_free:
            return ProbeRun(worst_first(self._results), cpu_s, start_cpu_s=self._start_cpu_s)
        return ProbeRun(worst_first(self._results), cpu_s + self._start_cpu_s)

    async def _answer(self, name: str, request: Request, within_s: float) -> str:
        """Fill `_results`; return why there is no good answer, or nothing."""
        if self._process is None and (trouble := await self._start()):
            return trouble
        timed = msgspec.structs.replace(request, until=time.monotonic() + within_s)
        async with asyncio.timeout(within_s + _MARGIN_S):
            done = await self._ask(timed)
        if done is None:
            return f"its process ended early{await self._how()}"
        self._run_cpu_s = done.cpu_s
        self._known_cpu_s += done.cpu_s
        if done.trouble:
            log.warning("probe_notes_lost check=%s reason=%r", name, done.trouble)
        if not self._has_ended:  # its thread is stuck, and would take part in the next run
            return f"it did not answer within {within_s:g} s"
        return ""

    async def end(self) -> None:
        """Kill the process with everything that it has started, and wait for that, but not long."""
        if self._transport is not None:
            self._transport.close()
        process = self._process
        self.is_gone = process is None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        until, below = time.monotonic() + _GONE_WITHIN_S, set[int]()
        while time.monotonic() < until:
            if not self.is_gone:
                below |= await asyncio.to_thread(process_tree.kill_tree, process.pid)
                self.is_gone = process.poll() is not None
            if self.is_gone and process_tree.has_reaped(below):
                break
            await asyncio.sleep(_LOOK_S)

    async def _start(self) -> str:
        """Start the process; return why it cannot be used, or nothing."""
        beginning = asyncio.get_running_loop().run_in_executor(None, _begin)
        try:
            self._process = await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the thread starts it all the same; `end` must know it
            with contextlib.suppress(OSError):
                self._process = await beginning
            raise
        except OSError as error:
            return f"its process cannot be started: {error.strerror}"
        assert self._process.stdout is not None
        reader = self._reader = asyncio.StreamReader(limit=_LINE_MOST)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), self._process.stdout
        )
        try:
            async with asyncio.timeout(_READY_WITHIN_S):
                ready = await self._line()
        except TimeoutError:
            return f"its process was not ready within {_READY_WITHIN_S:g} s"
        if not isinstance(ready, ChecksDone):
            return f"its process ended early{await self._how()}"
        self._known_cpu_s = self._start_cpu_s = ready.cpu_s
        return ""

    async def _ask(self, request: Request) -> ChecksDone | None:
        """Send the request, and collect its results until it is done; None if the process ended."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        self._has_ended = False
        await asyncio.to_thread(process.stdin.write, encode(request))
        while (line := await self._line()) is not None:
            if isinstance(line, CheckFound) and len(self._results) < _RESULTS_MOST:
                self._results.append(line.result)
            elif isinstance(line, CheckEnded):
                self._has_ended = True
            elif isinstance(line, ChecksDone):
                return line
        return None

    async def _line(self) -> Line | None:
        assert self._reader is not None
        try:
            data = await self._reader.readline()
            return decode_line(data) if data else None
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("probe_line_refused error=%r", str(error))
            return None

    async def _how(self) -> str:
        """How the process ended; its pipe closes a moment before it can be reaped."""
        if self._process is None:
            return ""
        try:
            code = await asyncio.to_thread(self._process.wait, _GONE_WITHIN_S)
        except subprocess.TimeoutExpired:
            return ""
        return f": exit code {code}" if code >= 0 else f": killed by {signal.Signals(-code).name}"

    def _spent_s(self) -> float:
        """The processor time of the process and of everything below it, before they are killed."""
        if self._process is None:
            return 0.0
        below = process_tree.descendants(self._process.pid)
        return sum(_cpu_s(pid) for pid in (self._process.pid, *below))


def _begin() -> "subprocess.Popen[bytes]":
    """Start the process, without our logins, as programs of the site run below it.

    Not through asyncio, which would reap it as soon as it ends.
    """
    return subprocess.Popen(  # noqa: S603  ourselves
        [sys.executable, "-P", "-m", worker_module.__name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        process_group=0,
        env=without_logins(os.environ),  # noqa: TID251  handed on, not read
    )


def _is_there(pid: int) -> bool:
    return bool(process_tree.stat(pid))


def _cpu_s(pid: int) -> float:
    fields = process_tree.stat(pid)
    if len(fields) <= _CSTIME:
        return 0.0
    return _TICKS_S * sum(int(fields[at]) for at in (_UTIME, _STIME, _CUTIME, _CSTIME))


def _unknown(name: str, reason: str, cpu_s: float = 0.0) -> ProbeRun:
    return ProbeRun((CheckResult(check=name, state="unknown", reason=reason),), cpu_s)
