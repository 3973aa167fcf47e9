"""Finds ranks of torchrun that make no progress, by the pages that their sessions write."""

import asyncio
import fcntl
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import RankBeat, SectionSeen, StartRanks
from everstep_services.agent.attached.job_folder import bound_socket
from everstep_services.agent.attached.rank_watch import FoundPage, RankWatch
from everstep_services.agent.ranks.protocol import RankGone
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.judge import Moving, Stalled
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.agent.stalls.monitor import MonitoredRanks, StallMonitor
from everstep_services.agent.stalls.process_state import ProcessState
from everstep_services.agent.stalls.recorder import limits_in
from everstep_services.agent.telemetry.progress import beat_of
from trainer_sdk.attachment import AGENT_LOCK, private_folder
from trainer_sdk.launchers import LaunchedRank, launcher_of

log = logging.getLogger(__name__)

_REPORT_EVERY_S = 5.0

Report = Callable[[int, str, float], Awaitable[None]]
"""Reports a rank, why, and for how long it has made no progress."""


class RankHangs:
    """The watch of one node: ranks whose scripts open a session are judged by limits."""

    def __init__(
        self, folder: Path, place: LaunchedRank, rules: LimitRules, clock: Clock, report: Report
    ) -> None:
        self._folder = folder
        self._place = place
        self._clock = clock
        self._report = report
        self._pids: dict[int, int] = {}
        """The process of each rank that runs."""
        self._watching: RankWatch | None = None
        self._stalls: dict[int, Stalled] = {}
        ranks = MonitoredRanks(self._live, self._rank, self._stalled, self._moving, log.warning)
        self._monitor = StallMonitor(rules, clock, ranks)

    async def watch_for_ever(
        self, bus: Bus, job: str, order: Callable[[], StartRanks | None]
    ) -> None:
        """Watch until cancelled."""
        with _door(self._folder) as door:
            self._watching = watching = RankWatch(self._folder, self._place, door, self._clock)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(watching.watch_for_ever())
                tasks.create_task(self._follow_for_ever(watching, order))
                tasks.create_task(self._monitor.judge_for_ever())
                tasks.create_task(self._monitor.look_closer_for_ever())
                tasks.create_task(self._learn_for_ever(bus, job))
                tasks.create_task(self._report_for_ever())

    def beats(self) -> tuple[RankBeat, ...]:
        """Where the ranks are."""
        now, beats = self._clock.now(), []
        for rank in sorted(self._pids):
            watched = self._rank(rank)
            page = None if watched is None else watched.reading()
            beats.append(beat_of(rank, page, self._monitor.standing(rank), now))
        return tuple(beats)

    def sections_seen(self) -> tuple[SectionSeen, ...]:
        """How long sections took, from which limits are learned."""
        return self._monitor.sections_seen()

    async def _follow_for_ever(
        self, watching: RankWatch, order: Callable[[], StartRanks | None]
    ) -> None:
        while True:
            event = await watching.events.get()
            match event:
                case FoundPage():
                    self._came(watching, event, order())
                case RankGone() if self._pids.get(event.rank) == event.pid:
                    del self._pids[event.rank]
                    self._stalls.pop(event.rank, None)
                case _:
                    pass
            watching.events.task_done()

    def _came(self, watching: RankWatch, page: FoundPage, order: StartRanks | None) -> None:
        if order is None or launcher_of(page.pid, self._place) != os.getpid():
            page.page.close()  # of another torchrun on this host
            return
        if not self._pids:  # the ranks of the round before are gone
            self._stalls.clear()
            watching.begins(page.round, self._clock.now())
            self._monitor.begins(order)
        self._pids[page.rank] = page.pid
        watching.add(page)

    async def _learn_for_ever(self, bus: Bus, job: str) -> None:
        async with bus.documents("LIMITS").follow(job) as documents:
            async for document in documents:
                self._monitor.learned(limits_in(document.data, ""))

    async def _report_for_ever(self) -> None:
        """Report each stall, again and again until its round is over or the rank moves."""
        while True:
            await self._clock.sleep(_REPORT_EVERY_S if self._stalls else 1.0)
            for rank, stalled in list(self._stalls.items()):
                place = stalled.place
                waited_s = self._clock.now() - place.since_s
                where = f" in section {place.section}" if place.section else ""
                reason = f"rank {rank} made no progress for {waited_s:.1f} s{where}"
                limit = f"the limit is {place.limit.s:g} s"
                await self._report(rank, f"{reason}; {limit}", waited_s)

    def _live(self) -> Collection[int]:
        return self._pids.keys()

    def _rank(self, rank: int) -> WatchedRank | None:
        return None if self._watching is None else self._watching.ranks.rank(rank)

    def _stalled(self, stalled: Stalled, process: ProcessState) -> None:
        log.warning("rank_stalled rank=%d %s", stalled.place.rank, process.text)
        self._stalls[stalled.place.rank] = stalled

    def _moving(self, moving: Moving) -> None:
        self._stalls.pop(moving.stalled.place.rank, None)


@contextmanager
def _door(folder: Path) -> Iterator[socket.socket]:
    """The socket for rare messages of ranks, and the lock that keeps an agent of theirs away.

    A second torchrun of this job on the same host has neither; it sees pages all the same.
    """
    for each in (folder.parent, folder):
        private_folder(str(each))
    lock = os.open(folder / AGENT_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    opened: AbstractContextManager[socket.socket] = bound_socket(folder)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        log.info("another_torchrun_is_here folder=%s", folder)
        opened = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        with opened as door:
            yield door
    finally:
        os.close(lock)
