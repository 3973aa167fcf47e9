"""Whether the interpreter of a rank still runs Python; asked only of ranks that are nearly late."""

import asyncio
import re
from dataclasses import dataclass
from math import inf
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.torch_server import ask, has_server

WITHIN_S = 0.5
"""An answer that comes later is left out, unless a setting allows more time."""
AHEAD_S = 0.6
"""A rank is asked this long before it is late, so that its finding need not wait."""
_FRESH_S = 5.0
_PING_EVERY_S = 0.05
_PINGED_S = 2.0
"""Pings that are answered for this long show enough, however long an answer may take: a thread that
only waits for a processor has had one by then."""
_DISTRIBUTED = ("distributed_c10d.py:", "_functional_collectives.py:", "rendezvous.py:")
_FRAME = re.compile(r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<function>.+)')


@dataclass(frozen=True, slots=True)
class Interpreter:
    """The answer of a rank's own threads."""

    runs: bool
    """Whether its threads run Python; otherwise one of them keeps the lock."""
    at: str = ""
    """Where the main thread is, if it is in Python."""

    @property
    def shows(self) -> bool:
        """It shows whether the rank waits for others."""
        return bool(self.at) or not self.runs

    @property
    def is_in_distributed(self) -> bool:
        """The main thread is in a call of torch.distributed, which waits for other ranks."""
        return self.at.startswith(_DISTRIBUTED)


async def look_into(folder: Path, within_s: float = WITHIN_S) -> Interpreter | None:
    """Whether Python runs in a rank; None if that is not known in time.

    Torch's server needs the interpreter's lock for a traceback, and does not need it for a ping.
    Several pings in a row that are answered before an earlier request for a traceback show that
    the lock is held: a process that only waits for a processor, or is stopped, answers neither.
    """
    pings = int(min(0.8 * within_s, _PINGED_S) / _PING_EVERY_S)
    try:
        async with asyncio.timeout(within_s), asyncio.TaskGroup() as tasks:
            trace = tasks.create_task(ask(folder, "dump_traceback", within_s))
            answered = 0
            while not trace.done() and answered < pings:
                if await ask(folder, "ping", within_s) is None:
                    break
                answered += 1
                await asyncio.wait([trace], timeout=_PING_EVERY_S)
            if not trace.done():
                trace.cancel()
    except TimeoutError:
        return None
    if trace.cancelled():
        return Interpreter(runs=False) if answered == pings else None
    text = trace.result()
    return None if text is None else Interpreter(runs=True, at=_place(text))


class Interpreters:
    """The answers of ranks, by folder: a rank has another folder in each round."""

    def __init__(self, clock: Clock, within_s: float = WITHIN_S) -> None:
        self.within_s = within_s
        self._clock = clock
        self._asking: set[Path] = set()
        self._asked: dict[Path, float] = {}
        self._found: dict[Path, Interpreter] = {}

    def begins(self) -> None:
        """A new round: forget all answers."""
        self._asked.clear()
        self._found.clear()

    def of(self, folder: Path) -> Interpreter | None:
        """The answer, if it is recent."""
        fresh_s = _FRESH_S + self.within_s
        is_fresh = self._clock.now() - self._asked.get(folder, -inf) <= fresh_s
        return self._found.get(folder) if is_fresh else None

    def is_open(self, folder: Path, since_s: float) -> bool:
        """Nothing is known, nobody has asked since, and the rank has a server."""
        if self.of(folder) is not None or self._asked.get(folder, -inf) >= since_s:
            return False
        return has_server(folder)

    def is_asked(self, folder: Path) -> bool:
        """An answer is on its way."""
        return folder in self._asking

    async def ask(self, folder: Path) -> None:
        """Ask, at most once at a time."""
        self._asking.add(folder)
        self._asked[folder] = self._clock.now()
        self._found.pop(folder, None)
        try:
            answer = await look_into(folder, self.within_s)
        finally:
            self._asking.discard(folder)
        if answer is not None:
            self._found[folder] = answer


def in_words(
    process: ProcessState, python: Interpreter | None, waits_in: str | None
) -> ProcessState:
    """The state of a stalled rank in words: from the kernel, its interpreter, its collectives."""
    parts = [process.text]
    if not process.is_own_reason and python is not None:
        if process.letter == "R":
            parts = ["it computes"]
        if python.at:
            parts.append(f"its main thread is at {python.at}")
        if not python.runs:
            parts.insert(0, "it holds the interpreter's lock: no Python thread of it runs")
    if waits_in:
        parts.append(f"it is in the collective {waits_in}")
    waits = bool(waits_in) or (python is not None and python.is_in_distributed)
    waits &= not process.is_own_reason and (python is None or python.runs)
    # Without an answer of its interpreter, a rank that was not seen in a collective may be in one;
    # so may one behind a lock: there gloo waits for a peer, and it records no transfers.
    is_seen = bool(waits_in) if process.is_behind_lock else waits_in is not None
    is_told = process.is_own_reason or is_seen or bool(python and python.shows)
    if waits or not is_told:
        parts.append(f"it {'waits' if waits else 'may wait'} for other ranks, so {_DOUBT}")
    text = "; ".join(part for part in parts if part)
    return ProcessState(process.letter, text, waits if waits or is_told else None)


_DOUBT = "the cause may be another one"


def _place(traceback: bytes) -> str:
    """The innermost frame of the thread that is listed last: the oldest thread."""
    threads = traceback.decode(errors="replace").strip().split("\n\n")
    match = _FRAME.search(threads[-1])
    if match is None:
        return ""
    return f"{match['file'].rpartition('/')[2]}:{match['line']} in {match['function'].strip()}"
