"""The state of the ranks of the latest round, from datagrams, pages and the warden."""

import asyncio
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep_services.agent.core.exit import MemoryKill
from everstep_services.agent.ranks.protocol import (
    RankGone,
    RankRuns,
    RankSaid,
    RankSeen,
    ScriptEnded,
    StartKind,
    WardenEvent,
)
from trainer_sdk.page import BadPageError, PageView
from trainer_sdk.page_content import PageReading, RankPhase
from trainer_sdk.wire import Datagram, Deferred, Gone, ScriptFinished, Spawned, Stepped, Up


@dataclass(slots=True)
class WatchedRank:
    """A rank of the present round."""

    folder: Path
    page: PageView
    pid: int = 0
    start: StartKind = "cold"
    runs: bool = False
    stepped: bool = False
    ended: bool = False
    """Its script is over; its process may take its time."""
    gone: bool = False
    is_program: bool = False
    """It runs without our bootstrap: it is unknown until it opens its page itself."""
    early: list[tuple[Datagram, float]] = field(default_factory=list)

    def reading(self) -> PageReading | None:
        """The contents of its page; None before it is opened, or if it cannot be trusted."""
        try:
            return self.page.read()
        except BadPageError:
            return None


class RoundWatch:
    """Turns messages of ranks and warden into events, each once and in a sensible order.

    A datagram may have been dropped: the pages contain the same.
    """

    def __init__(
        self,
        events: "asyncio.Queue[WardenEvent]",
        deferred: Callable[[int, int], None] = lambda *_: None,
        *,
        is_silent: bool = False,
    ) -> None:
        self.bad_datagrams = 0
        self._are_told = False
        """The ranks of this round were ordered to end."""
        self._is_silent = is_silent
        """The ranks are programs without a bootstrap: they run as soon as they exist."""
        self._events = events
        self._deferred = deferred
        """Is called with a rank and the number of a signal that it has deferred."""
        self._round = 0
        self._began = 0.0
        self._ranks: dict[int, WatchedRank] = {}

    def ordered_to_end(self) -> None:
        """The ranks of this round are being stopped: their ends from now on were ordered."""
        self._are_told = True

    def begin(self, number: int, now: float) -> None:
        """Forget the previous round, and begin the next."""
        for rank in self._ranks.values():
            rank.page.close()
        self._ranks.clear()
        self._are_told = False
        self._round = number
        self._began = now

    def add(self, number: int, folder: Path, page: PageView) -> None:
        """A rank is about to be started."""
        self._ranks[number] = WatchedRank(folder, page, is_program=self._is_silent)

    def rank(self, number: int) -> WatchedRank | None:
        """The state of a rank."""
        return self._ranks.get(number)

    def pids(self) -> dict[int, int]:
        """Their process ids by rank, also of those that are gone."""
        return {number: rank.pid for number, rank in self._ranks.items() if rank.pid}

    @property
    def are_at_work(self) -> bool:
        """Some scripts have not ended, as far as is known, or are about to begin."""
        return not all(rank.ended or rank.gone for rank in self._ranks.values())

    @property
    def began_s(self) -> float:
        """When they were about to be started, by the clock."""
        return self._began

    def seen(self) -> tuple[RankSeen, ...]:
        """All ranks, for those who look at them from outside."""
        return tuple(
            RankSeen(number, 0 if rank.gone else rank.pid, rank.page, rank.folder, rank.gone)
            for number, rank in self._ranks.items()
        )

    def on_datagram(self, octets: bytes, now: float) -> None:
        """A rank has sent a datagram."""
        try:
            line = _DATAGRAM.decode(octets)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            self.bad_datagrams += 1
            return
        watched = self._ranks.get(line.rank)
        if watched is None or line.round != self._round:
            return
        if watched.pid == 0:  # the warden has not yet reported how it was started
            if len(watched.early) < _EARLY_MOST:
                watched.early.append((line, now))
        else:
            self._said(line, watched, now)

    def _said(self, line: Datagram, watched: WatchedRank, now: float) -> None:
        match line:
            case Up():
                self._runs(line.rank, watched, line.pid, now)
            case Stepped():
                self._steps(line.rank, watched, line.step, now)
            case ScriptFinished():
                watched.ended = True
                ended = ScriptEnded(self._round, line.rank, line.code, self._are_told)
                self._events.put_nowait(ended)
            case Deferred():
                self._deferred(line.rank, line.number)
            case _:
                self._events.put_nowait(RankSaid(self._round, line.rank, line))

    def look(self, now: float) -> None:
        """Read the pages of ranks whose datagram may have been dropped."""
        for number, rank in self._ranks.items():
            if rank.pid == 0 or rank.gone or (rank.runs and rank.stepped):
                continue
            reading = rank.reading()
            if reading is None or reading.phase is RankPhase.STARTING:
                continue
            self._runs(number, rank, reading.pid, now)
            if reading.first_step_s:
                self._steps(number, rank, reading.step - max(reading.steps - 1, 0), now)

    def spawned(self, line: Spawned, now: float) -> None:
        """A rank has a process."""
        watched = self._ranks.get(line.rank)
        if watched is not None and line.round == self._round:
            watched.pid, watched.start = line.pid, line.start
            early, watched.early = watched.early, []
            for message, at in early:
                self._said(message, watched, at)
            if self._is_silent:
                self._runs(line.rank, watched, line.pid, now)

    def _runs(self, number: int, rank: WatchedRank, pid: int, now: float) -> None:
        if not rank.runs:
            rank.runs = True
            took_s = now - self._began
            self._events.put_nowait(RankRuns(self._round, number, pid, rank.start, took_s))

    def _steps(self, number: int, rank: WatchedRank, step: int, now: float) -> None:
        self._runs(number, rank, rank.pid, now)
        if not rank.stepped:
            rank.stepped = True
            self._events.put_nowait(Stepped(round=self._round, rank=number, step=step))

    def parked(self, ranks: Collection[int]) -> None:
        """The round is over, and these ranks wait for the next: their pages stand still."""
        for number in self._ranks.keys() & set(ranks):
            self._ranks[number].gone = True

    def gone(self, line: Gone, now: float, memory: MemoryKill = "") -> None:
        """Its process has ended."""
        self.look(now)  # so that the start of a short-lived rank precedes its end
        if line.round == self._round and line.rank in self._ranks:
            self._ranks[line.rank].gone = True
        name = signal.Signals(line.signal).name if line.signal in _NAMED else None
        if line.signal is not None and name is None:
            name = f"SIG{line.signal}"
        self._events.put_nowait(
            RankGone(
                line.round, line.rank, line.pid, line.code, name, line.core_dumped,
                line.lasted_s, memory, line.told,
            )
        )  # fmt: skip


_DATAGRAM: "msgspec.json.Decoder[Datagram]" = msgspec.json.Decoder(Datagram)
_EARLY_MOST = 64
_NAMED = frozenset(signal.Signals)
