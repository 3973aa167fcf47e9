"""Measures where the time of this node's ranks goes, and sends it to straggler once a window."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import inf
from statistics import median

from everstep import subjects
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import (
    BadMessageError,
    ClockOffset,
    CollectiveEntries,
    KernelTiming,
    NodeTimings,
    RankTiming,
    StragglersDocument,
    decode_as,
)
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.timings import host
from everstep_services.agent.timings.clock_offset import ClockOffsets
from everstep_services.agent.timings.collective_entries import CollectiveEntry, collectives, within
from everstep_services.agent.timings.flight_recorders import FlightRecorders, RecordedEntries
from everstep_services.agent.timings.host import HostReading, ProcessReading, System, Workers
from everstep_services.agent.timings.node_readings import DetachedThread, NodeReadings, read_all
from everstep_services.agent.timings.window import (
    SHORTEST_S,
    Closed,
    RankPage,
    StepRange,
    section_at,
    steps_of,
)
from trainer_sdk.page import BadPageError

log = logging.getLogger(__name__)

WINDOW_STEPS = 16
_LOOK_EVERY_S = 0.5
_WAITS_FOR_RANKS_S = 2.0
_COUNTED_WITHIN_S = 30.0
"""A round without a step after this time is measured by time, until it makes one."""
_HOST_WITHIN_S = 2.0

host_wall = partial(time.clock_gettime, time.CLOCK_REALTIME)
"""The clock whose times torch's flight recorder writes."""


@dataclass(frozen=True, slots=True)
class RoundPosition:
    """The part of a round that the ranks of this node are."""

    round: int
    slot: int
    slots: int
    world: int
    ranks: Collection[int]


@dataclass(frozen=True, slots=True)
class TimingOptions:
    """How straggler wants the measurements."""

    is_on: bool = True
    window_steps: int = WINDOW_STEPS
    is_cpu_timed: bool = True


@dataclass(slots=True)
class _Rank:
    """The state of a rank of the present round."""

    watched: WatchedRank
    page: RankPage = field(default_factory=RankPage)
    pid: int = 0
    is_cpu_timed: bool | None = None
    gap: str = ""
    before: ProcessReading | None = None
    """The counters at the beginning of the window; None before they were read."""
    kernels_written_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Over:
    """A window that is over, and everything that was read at its end."""

    window: StepRange
    is_by_time: bool
    lasted_s: float
    ahead_s: float
    """The wall clock minus the monotonic one."""
    closed: Mapping[int, Closed]
    late: frozenset[int]
    """The ranks that have not finished it."""
    host: NodeReadings
    recorded: RecordedEntries

    def collectives(self, rank: int) -> tuple[float, tuple[CollectiveEntries, ...]]:
        """The entries of the rank in the window, and the start of their time."""
        recording, closed = self.recorded.recordings.get(rank), self.closed[rank]
        if recording is None:
            return 0.0, ()
        starts_s, ends_s = closed.starts_s + self.ahead_s, closed.ends_s + self.ahead_s
        has_sections = any(section.section for section in closed.sections)
        section = partial(_section, closed, self.ahead_s) if has_sections else None
        return collectives(within(recording, starts_s, ends_s), recording.members, section)


@dataclass(eq=False, repr=False)
class TimingMonitor:
    """Measures for one agent. It reads pages and the kernel, and asks torch's own threads."""

    _job: str
    _node: str
    _bus: Bus
    _clock: Clock
    _place: Callable[[], RoundPosition | None]
    _rank: Callable[[int], WatchedRank | None]
    _role: str = ""
    _wall: Callable[[], float] = host_wall

    def __post_init__(self) -> None:
        self._system = System()
        self._clocks = ClockOffsets(self._job, self._bus, self._clock, self._wall)
        self._wanted = TimingOptions()
        self._round: int | None = None
        self._ranks: dict[int, _Rank] = {}
        self._window: StepRange | None = None
        self._size = WINDOW_STEPS
        self._reached_s: float | None = None
        """When the first rank had finished the window."""
        self._host = HostReading()
        self._workers = Workers()
        self._sent_s = -inf
        self._recorders = FlightRecorders()
        self._thread = DetachedThread[NodeReadings]("timings")
        self._began_s: float | None = None
        """When the first rank of the round was seen."""
        self._is_by_time = False
        """Nobody counts steps: windows are seconds of the wall clock, the same on all nodes."""

    async def tell_for_ever(self) -> None:
        """Follow the options of straggler, and measure."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follow_for_ever())
            tasks.create_task(self.measure_for_ever())

    async def follow_for_ever(self) -> None:
        """Follow the options of straggler."""
        async with self._bus.documents("STRAGGLERS").follow(self._job) as documents:
            async for document in documents:
                before, self._wanted = self._wanted, wanted_in(document.data)
                if self._wanted.window_steps != before.window_steps:
                    self._window = None
                log.info("timings_wanted %s", self._wanted)

    async def measure_for_ever(self) -> None:
        """Look at the pages again and again, and send each window once it is over."""
        while True:
            await self._look()
            await self._clock.sleep(_LOOK_EVERY_S)

    async def _look(self) -> None:
        place = self._place()
        if place is None or not self._wanted.is_on:
            self._forget(None)
            return
        if place.round != self._round:
            self._forget(place.round)
        for rank in place.ranks:
            self._read_page(rank)
        live = {
            rank: measured for rank, measured in self._ranks.items() if not measured.watched.gone
        }
        if not live:
            return
        await self._read_new(live)
        self._choose(live)
        if self._window is None:
            self._open(live)
        elif self._is_by_time:
            await self._look_at_clock(place, self._window)
        else:
            await self._look_at_steps(place, live, self._window)

    def _choose(self, live: Mapping[int, _Rank]) -> None:
        """Count steps, or seconds where nobody counts steps."""
        if self._began_s is None:
            self._began_s = self._clock.now()
        counts = any(measured.page.steps for measured in live.values())
        is_by_time = not counts and self._clock.now() - self._began_s >= _COUNTED_WITHIN_S
        if is_by_time != self._is_by_time:
            self._is_by_time, self._window = is_by_time, None
            log.info("windows_by_%s round=%s", "time" if is_by_time else "steps", self._round)

    async def _look_at_clock(self, place: RoundPosition, window: StepRange) -> None:
        at_s = self._wall()
        if not window.first - 1 - window.count <= at_s < window.last + window.count:
            self._window = None  # the clock was set: earlier instants cannot be compared
        elif at_s >= window.last:
            await self._close(place, window)

    async def _look_at_steps(
        self, place: RoundPosition, live: Mapping[int, _Rank], window: StepRange
    ) -> None:
        now = self._clock.now()
        reached = [measured for measured in live.values() if measured.page.steps >= window.last]
        if reached and self._reached_s is None:
            self._reached_s = now
        is_late = self._reached_s is not None and now - self._reached_s >= _WAITS_FOR_RANKS_S
        if reached and (is_late or len(reached) == len(live)):
            await self._close(place, window)

    # -- pages ------------------------------------------------------------------------------------

    def _read_page(self, rank: int) -> None:
        watched = self._rank(rank)
        if watched is None:
            self._ranks.pop(rank, None)
            return
        rank_state = self._ranks.get(rank)
        if rank_state is None or rank_state.watched is not watched:
            rank_state = self._ranks[rank] = _Rank(watched)
        last = 0 if self._window is None else self._window.last
        try:
            page = watched.page.read()
            if page is None:
                return  # it has not opened its page yet
            rank_state.pid = page.pid
            if rank_state.is_cpu_timed != self._wanted.is_cpu_timed:
                rank_state.is_cpu_timed = self._wanted.is_cpu_timed
                watched.page.time_cpu(is_wanted=rank_state.is_cpu_timed)
            rank_state.page.take(watched.page, last or rank_state.page.steps, self._clock.now())
        except BadPageError as error:
            rank_state.gap = f"page unreadable: {error}"

    def _forget(self, round: int | None) -> None:
        if round is None:
            for rank_state in self._ranks.values():
                _time_no_cpu(rank_state)
        self._round = round
        self._ranks.clear()
        self._window = None
        self._reached_s = None
        self._began_s, self._is_by_time = None, False

    # -- windows ----------------------------------------------------------------------------------

    async def _read_new(self, live: Mapping[int, _Rank]) -> None:
        """Ranks that have just begun: their usage counts from here on."""
        new = {
            rank: measured
            for rank, measured in live.items()
            if measured.pid and measured.before is None
        }
        if new:
            host = await self._read_host(new)
            self._host = host.node
            for rank, rank_state in new.items():
                rank_state.before = host.processes.get(rank)

    def _open(self, live: Mapping[int, _Rank]) -> None:
        """Begin with the round's first step, or else with the next whole window."""
        self._size = max(1, self._wanted.window_steps)
        made = max(measured.page.steps for measured in live.values())
        if self._is_by_time:
            made = int(self._wall())
        for measured in live.values():
            measured.page.restart()
        self._window = StepRange(made, made).after(self._size)

    async def _close(self, place: RoundPosition, window: StepRange) -> None:
        """Send the window, and begin the next one."""
        ahead_s = self._wall() - self._clock.now()
        ranks = dict(self._ranks)
        if self._is_by_time:
            late, lasted_s = frozenset[int](), float(window.count)
            starts_s = window.first - 1 - ahead_s
            closed = {
                rank: measured.page.close_at(window, starts_s) for rank, measured in ranks.items()
            }
        else:
            late = frozenset(
                rank for rank, measured in ranks.items() if measured.page.steps < window.last
            )
            closed = {rank: measured.page.close(window) for rank, measured in ranks.items()}
            lasted = [measured.window_s for rank, measured in closed.items() if rank not in late]
            lasted_s = median(lasted or [0.0])
        is_told = window.is_whole(self._size) and self._sent_s + SHORTEST_S <= self._clock.now()
        self._next(window, lasted_s)
        live = {rank: measured for rank, measured in ranks.items() if not measured.watched.gone}
        if not is_told:
            self._take_readings(await self._read_host(live))
            return
        folders = {rank: measured.watched.folder for rank, measured in live.items()}
        async with asyncio.TaskGroup() as reading:
            host_read = reading.create_task(self._read_host(live))
            recorders = reading.create_task(self._recorders.read(folders, window, lasted_s))
            clocks = reading.create_task(self._clocks.offsets())
        host = host_read.result()
        over = _Over(
            window, self._is_by_time, lasted_s, ahead_s, closed, late, host, recorders.result()
        )
        self._send(place, over, clocks.result())
        self._take_readings(host)

    def _next(self, window: StepRange, lasted_s: float) -> None:
        step_s = lasted_s / window.count if lasted_s else None
        self._size = steps_of(self._wanted.window_steps, step_s)
        self._window = window.after(self._size)
        self._reached_s = None

    def _send(self, place: RoundPosition, over: "_Over", offsets: tuple[ClockOffset, ...]) -> None:
        node = over.host.node
        message = NodeTimings(
            job=self._job,
            node=self._node,
            round=place.round,
            slot=place.slot,
            slots=place.slots,
            world=place.world,
            first_step=over.window.first,
            last_step=over.window.last,
            is_by_time=over.is_by_time,
            window_s=round(over.lasted_s, 6),
            clocks=offsets,
            host_steal_s=host.steal_between(self._host, node),
            link_errors=host.link_errors(self._host, node),
            ranks=tuple(
                self._timing(rank, self._ranks[rank], over)
                for rank in sorted(over.closed)
                if rank in self._ranks
            ),
        )
        self._bus.send(subjects.timing(self._job, self._node), message)
        self._sent_s = self._clock.now()

    def _timing(self, rank: int, rank_state: _Rank, over: "_Over") -> RankTiming:
        closed, is_late = over.closed[rank], rank in over.late
        gaps = [rank_state.gap, over.recorded.gaps.get(rank, "")]
        if rank_state.watched.gone:
            gaps.append("gone")
        elif is_late:
            gaps.append("it has not finished the window")
        rank_state.gap = ""
        from_s, series = over.collectives(rank)
        before, after = rank_state.before, over.host.processes.get(rank)
        return RankTiming(
            rank=rank,
            steps=0 if is_late else closed.steps,
            window_s=round(closed.window_s, 6),
            role=self._role,
            sections=closed.sections,
            entries_from_s=from_s,
            collectives=series,
            host=host.use_between(before, after) if before and after else None,
            device=over.host.devices.get(rank),
            kernels=self._kernels(rank_state, over.host, rank),
            gap="; ".join(gap for gap in gaps if gap),
        )

    def _kernels(
        self, rank_state: _Rank, host: NodeReadings, rank: int
    ) -> tuple[KernelTiming, ...]:
        written_s, kernels = host.kernels.get(rank, (0.0, ()))
        if written_s == rank_state.kernels_written_s:
            return ()  # they were sent already
        rank_state.kernels_written_s = written_s
        return kernels

    # -- what is read at the end of a window -----------------------------------------------------

    async def _read_host(self, live: Mapping[int, _Rank]) -> NodeReadings:
        watched = {
            rank: (measured.pid, measured.watched.folder)
            for rank, measured in live.items()
            if measured.pid
        }
        read = partial(read_all, watched, self._system, self._workers)
        return await self._thread.run(read, _HOST_WITHIN_S) or NodeReadings()

    def _take_readings(self, host: NodeReadings) -> None:
        self._host = host.node
        for rank, rank_state in self._ranks.items():
            rank_state.before = host.processes.get(rank)


def wanted_in(data: bytes | None) -> TimingOptions:
    """The options in the document; defaults if there is none that can be read."""
    if data is None:
        return TimingOptions()
    try:
        document = decode_as(data, StragglersDocument)
    except BadMessageError as error:
        log.warning("stragglers_unreadable error=%s", error)
        return TimingOptions()
    steps = max(1, document.window_steps)
    return TimingOptions(document.is_on, steps, document.is_cpu_timed)


def _section(closed: Closed, ahead_s: float, entry: CollectiveEntry) -> int:
    number = section_at(closed.stretches, entry.at_s - ahead_s)
    return closed.numbers.index(number) if number in closed.numbers else -1


def _time_no_cpu(rank_state: _Rank) -> None:
    try:
        if rank_state.is_cpu_timed and not rank_state.watched.gone:
            rank_state.watched.page.time_cpu(is_wanted=False)
    except (BadPageError, ValueError):
        return  # the page is damaged, or belongs to a round that is over
