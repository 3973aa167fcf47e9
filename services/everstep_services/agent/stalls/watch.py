"""Watches the ranks of the present round for stalls: reads, judges, and says what it found."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from everstep.clock import Clock
from everstep.messages import LimitsDocument, NameExcuse, SectionSeen, StartRanks
from everstep_services.agent.idleness import Idleness
from everstep_services.agent.ranks.watch import WatchedRank
from everstep_services.agent.stalls.collectives import Collectives, read_collectives
from everstep_services.agent.stalls.judge import Excused, Judge, Moving, Stalled, states
from everstep_services.agent.stalls.kernel import ProcessState, state_of, threads_of
from everstep_services.agent.stalls.limits import Limit, LimitRules, Limits
from everstep_services.agent.stalls.places import Aside, Place, Signs, View
from trainer_sdk.layout import OUTSIDE
from trainer_sdk.page import BadPageError, CountedBy, Kind, LaneReading, PageReading

log = logging.getLogger(__name__)

_LOOK_CLOSER_EVERY_S = 5.0
_SILENT_S = 30.0
"""Only ranks whose page has said nothing for so long are looked at more closely."""
_ASKED_RANK = -1
_SLACK_S = 0.25
"""A question takes its time from node to node."""


@dataclass(frozen=True, slots=True)
class Watched:
    """Whom to watch, and who is told."""

    live: Callable[[], Collection[int]]
    """The ranks of this round that are to be judged now."""
    rank: Callable[[int], WatchedRank | None]
    stalled: Callable[[Stalled, ProcessState], None]
    moving: Callable[[Moving], None]
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a rank is, for people."""

    state: str
    section: str | None
    section_age_s: float
    limit: Limit | None


class StallWatch:
    """One agent's. It reads pages and the kernel, and asks nothing of the training."""

    def __init__(self, rules: LimitRules, clock: Clock, watched: Watched) -> None:
        self.limits = Limits(rules)
        self._clock = clock
        self._watched = watched
        self._judge: Judge | None = None
        self._signs: dict[int, Signs] = {}
        self._entered: dict[int, int] = {}
        self._troubled: set[int] = set()
        self._idleness = Idleness(clock)
        self._due = asyncio.Event()

    @property
    def state(self) -> str:
        """`armed`, `learning`, `paused` or `off`; empty while no ranks run."""
        judge = self._judge
        if judge is None:
            return ""
        places = judge.places.values()
        if places and all(isinstance(one, Aside) for one in places):
            return "paused"
        return "learning" if self.limits.is_learning else "armed"

    def learned(self, document: LimitsDocument | None) -> None:
        """Health has published limits."""
        self.limits.learn(document)
        self._due.set()

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are being started: nothing of the one before counts."""
        log.info("stalls_watched round=%d", order.round)
        self._judge = Judge(self.limits, self._clock.now())
        self._signs.clear()
        self._entered.clear()
        self._troubled.clear()
        self._due.set()

    def ends(self) -> None:
        """The round is over here."""
        self._judge = None

    async def judge_for_ever(self) -> None:
        """Look whenever a rank may be late; whatever happens meanwhile, it is not missed."""
        while True:
            self._due.clear()
            judge = self._judge
            if judge is None:
                await self._due.wait()
                continue
            self._look(judge)
            try:
                async with asyncio.timeout(max(0.0, judge.wake_at - self._clock.now())):
                    await self._due.wait()
            except TimeoutError:
                continue

    async def look_closer_for_ever(self) -> None:
        """See by other signs whether ranks work whose pages are silent."""
        while True:
            await self._clock.sleep(_LOOK_CLOSER_EVERY_S)
            silent = self._silent()
            pids = {rank: known.pid for rank, known in silent.items() if known.pid}
            idle_s = await asyncio.to_thread(self._idleness.look, pids)
            for rank, known in silent.items():
                collectives = await read_collectives(known.folder)
                self._note(rank, idle_s.get(rank), collectives)

    def look(self) -> None:
        """Look now: what a rank has done is seen before its script is forgotten."""
        if self._judge is not None:
            self._look(self._judge)

    def excuse(self, order: NameExcuse) -> tuple[int, float] | None:
        """Which rank of ours the stalled one may wait for, and how long it may go on."""
        judge = self._judge
        if judge is None:
            return None
        now = self._clock.now()
        self._look(judge)
        since_s = now - order.waited_s
        stalled = Place(_ASKED_RANK, "section", since_s, Limit(0.0, ""), step=order.step)
        return judge.excuse(stalled, now, _SLACK_S)

    def standing(self, rank: int) -> Standing | None:
        """Where a rank is now, for beats."""
        judge, known = self._judge, self._watched.rank(rank)
        if judge is None or known is None:
            return None
        section, age_s = self._open_section(known)
        place = judge.places.get(rank)
        limit = place.limit if isinstance(place, Place) else None
        return Standing(states(judge).get(rank, "running"), section, age_s, limit)

    def sections_seen(self) -> tuple[SectionSeen, ...]:
        """How long sections took at most on this node, since the first step of the round."""
        found: dict[str, SectionSeen] = {}
        for rank in self._watched.live():
            known = self._watched.rank(rank)
            if known is not None:
                for one in _seen_by(known):
                    before = found.get(one.section)
                    found[one.section] = one if before is None else _merged(before, one)
        return tuple(found.values())

    def _look(self, judge: Judge) -> None:
        # Who has stalled may move again and be gone at once: its page says so.
        ranks = {*self._watched.live(), *judge.stalled}
        views = [view for rank in sorted(ranks) for view in self._view(rank, judge)]
        for news in judge.look(views, self._clock.now()):
            match news:
                case Stalled():
                    state = state_of(news.place.pid) if news.place.pid else ProcessState("", "")
                    self._watched.stalled(news, state)
                case Moving():
                    self._watched.moving(news)
                case Excused():
                    log.info("stall_excused rank=%d by=%d", news.place.rank, news.by)

    def _view(self, rank: int, judge: Judge) -> Iterator[View]:
        known = self._watched.rank(rank)
        if known is None or (known.gone and rank not in judge.stalled):
            return
        signs = self._signs.get(rank, Signs())
        blank = View(rank, judge.began_s, signs=signs)
        try:
            page = known.page.read()
            lanes = known.page.lanes() if page is not None else ()
            others = any(lane.frames for lane in lanes[1:])
            threads = threads_of(page.pid) if others and page is not None else None
            # Read here, where a damaged page is told from a rank that has stalled.
            sections = {number: known.page.section(number) for number in _in_use(page, lanes)}
            yield replace(
                blank, page=page, lanes=lanes, threads=threads, section=sections.__getitem__
            )
        except BadPageError as error:
            if rank not in self._troubled:
                self._troubled.add(rank)
                self._watched.say(f"the page of rank {rank} is damaged, and not trusted: {error}")
            yield replace(blank, trouble=str(error))

    def _silent(self) -> dict[int, WatchedRank]:
        """Ranks of which only other signs can tell whether they work."""
        judge, now = self._judge, self._clock.now()
        if judge is None:
            return {}
        silent: dict[int, WatchedRank] = {}
        for rank in self._watched.live():
            known = self._watched.rank(rank)
            if known is None or known.gone:
                continue
            page = known.reading()
            moved_s = judge.began_s if page is None else page.progress_s
            is_modified = page is not None and page.steps and page.counted_by is CountedBy.SDK
            if not is_modified and now - moved_s >= _SILENT_S:
                silent[rank] = known
        return silent

    def _note(self, rank: int, idle_s: float | None, collectives: Collectives | None) -> None:
        before = self._signs.get(rank, Signs())
        if collectives is None:
            self._signs[rank] = replace(before, idle_s=idle_s, waits_in="")
            return
        moved_s = before.collective_s
        if collectives.entered > self._entered.get(rank, collectives.entered):
            moved_s = self._clock.now()
        self._entered[rank] = collectives.entered
        self._signs[rank] = Signs(idle_s, moved_s, collectives.waits_in)

    def _open_section(self, known: WatchedRank) -> tuple[str | None, float]:
        try:
            lanes: tuple[LaneReading, ...] = known.page.lanes()
            if not lanes or not lanes[0].frames:
                return None, 0.0
            frame = lanes[0].frames[-1]
            age_s = max(0.0, self._clock.now() - frame.since_s)
            return known.page.section(frame.section).name, age_s
        except BadPageError:
            return None, 0.0


def _in_use(page: PageReading | None, lanes: Collection[LaneReading]) -> set[int]:
    """The sections that are open, and the time outside of them once it has a limit."""
    numbers = {frame.section for lane in lanes for frame in lane.frames}
    return numbers | {OUTSIDE} if lanes and page is not None and page.steps else numbers


def _seen_by(known: WatchedRank) -> Iterator[SectionSeen]:
    page = known.reading()
    if page is None or not page.steps:
        return
    if page.counted_by is not CountedBy.SDK:
        yield _seen("", Kind.PLAIN, page.longest_step_s, page.steps - 1)
        return
    try:
        sections = known.page.sections()
    except BadPageError:
        return
    for one in sections:
        if not one.name:
            yield _seen("", one.kind, one.longest_s, page.steps - 1)
        elif one.observed:
            yield _seen(one.name, one.kind, one.longest_s, one.observed)


def _seen(name: str, kind: Kind, longest_s: float, observations: int) -> SectionSeen:
    return SectionSeen(
        section=name,
        kind=kind.value,
        longest_s=round(longest_s, 6),
        observations=max(0, observations),
    )


def _merged(one: SectionSeen, other: SectionSeen) -> SectionSeen:
    return SectionSeen(
        section=one.section,
        kind=one.kind,
        longest_s=max(one.longest_s, other.longest_s),
        observations=one.observations + other.observations,
    )
