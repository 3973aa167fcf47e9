"""Watches the ranks of the present round for stalls: reads, judges, and reports findings."""

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.clock import Clock
from everstep.messages import LimitsDocument, NameExcuse, SectionLimit, SectionSeen, StartRanks
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.collectives import entered_of
from everstep_services.agent.stalls.compilers import Compiling
from everstep_services.agent.stalls.interpreter import AHEAD_S, Interpreters, in_words
from everstep_services.agent.stalls.judge import (
    Excused,
    Moving,
    Stalled,
    StallJudge,
    WatchState,
    states,
)
from everstep_services.agent.stalls.limits import FIRST_STEP, Limit, LimitRules, StallLimits
from everstep_services.agent.stalls.position import Exempt, RankPosition
from everstep_services.agent.stalls.process_state import PROC, ProcessState, state_of, threads_of
from everstep_services.agent.stalls.rank_view import RankView
from everstep_services.agent.stalls.sampler import RankSampler, look_every_s, silent_after_s
from everstep_services.agent.stalls.section_times import in_force, merged, seen_by
from trainer_sdk.layout import OUTSIDE
from trainer_sdk.page import BadPageError
from trainer_sdk.page_content import CountedBy, LaneReading, PageReading

log = logging.getLogger(__name__)

_ASKED_RANK = -1
_ASKED_AGAIN_S = 15.0
"""Rendezvous repeats a question about an excuse within this time, as long as it wants an answer."""
_SLACK_S = 0.25
"""The time that a question takes from node to node."""


@dataclass(frozen=True, slots=True)
class MonitoredRanks:
    """The ranks to watch, and the receivers of findings."""

    live: Callable[[], Collection[int]]
    """The ranks of this round that must be judged now."""
    rank: Callable[[int], WatchedRank | None]
    stalled: Callable[[Stalled, ProcessState], None]
    moving: Callable[[Moving], None]
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RankStanding:
    """The position of a rank, for people."""

    state: str
    section: str | None
    section_age_s: float
    limit: Limit | None
    collectives: int | None = None
    """The number of collectives that it had entered at the last look, which happens while a page is
    silent or a rank is late.
    """
    collective_s: float = 0.0
    """When it was last seen to enter a collective; 0 if it was not."""
    collective: str | None = None
    """The collective that it is in, from a look after its last progress; empty for none, None if
    there was no such look.
    """


@dataclass(frozen=True, slots=True)
class _Unsaid:
    """A finding that waits for the answer of an interpreter."""

    stalled: Stalled
    process: ProcessState
    folder: Path | None
    found_s: float


class StallMonitor:
    """The monitor of one agent. It reads pages and the kernel, and asks nothing of the training.

    Only torch's own threads in a rank are asked: about collectives while its page is silent, and
    about its interpreter when it is nearly late. A finding waits for that, but not for long
    (`interpreter_within_s`), and mostly not at all.
    """

    def __init__(
        self, rules: LimitRules, clock: Clock, watched: MonitoredRanks, *, proc: Path = PROC
    ) -> None:
        self.limits = StallLimits(rules)
        self._clock = clock
        self._watched = watched
        self._proc = proc
        self._judge: StallJudge | None = None
        self._closer = RankSampler(clock, proc)
        self._interpreters = Interpreters(clock, rules.agent.interpreter_within_s)
        self._unsaid: dict[int, _Unsaid] = {}
        self._troubled: set[int] = set()
        self._due = asyncio.Event()
        self._in_question: set[int] = set()
        self._asked_until_s = 0.0
        self._closer_due = asyncio.Event()

    @property
    def state(self) -> WatchState:
        """Whether stalls are looked for; empty while no ranks run."""
        judge = self._judge
        if judge is None:
            return ""
        places = judge.places.values()
        if places and all(isinstance(place, Exempt) for place in places):
            return "paused"
        return "learning" if self.limits.is_learning else "armed"

    def learned(self, document: LimitsDocument | None) -> None:
        """Health has published limits."""
        self.limits.learn(document)
        self._due.set()

    def in_force(self) -> tuple[SectionLimit, ...]:
        """Each limit that can act on the ranks of this node, as they are."""
        ranks = (self._watched.rank(rank) for rank in self._watched.live())
        return in_force(self.limits, [times for times in ranks if times is not None])

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are being started: forget the round before."""
        log.info("stalls_watched round=%d", order.round)
        self._judge = StallJudge(self.limits, self._clock.now(), AHEAD_S, self._is_stopped)
        self._closer.begins()
        self._interpreters.begins()
        self._unsaid.clear()
        self._troubled.clear()
        self._in_question, self._asked_until_s = set(), 0.0
        self._due.set()

    def ends(self) -> None:
        """The round is over here."""
        self._judge = None
        self._unsaid.clear()

    async def judge_for_ever(self) -> None:
        """Look whenever a rank may be late, and never later because of other work."""
        async with asyncio.TaskGroup() as asking:
            while True:
                self._due.clear()
                judge = self._judge
                if judge is None:
                    await self._due.wait()
                    continue
                self._look(judge)
                for folder in self._to_ask(judge):
                    asking.create_task(self._ask(folder))
                try:
                    async with asyncio.timeout(max(0.0, self._wake_at(judge) - self._clock.now())):
                        await self._due.wait()
                except TimeoutError:
                    continue

    async def look_closer_for_ever(self) -> None:
        """Sample the ranks whose pages are silent, or that may be late."""
        while True:
            self._closer_due.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(look_every_s(self.limits)):
                    await self._closer_due.wait()
            await self._closer.look(self._silent(), self._compiling())
            if self._in_question:
                self._due.set()

    def look(self) -> None:
        """Look now, so that the last progress of a rank is seen before its script is forgotten."""
        if self._judge is not None:
            self._look(self._judge)
            if self._unsaid:
                self._due.set()

    def excuse(self, order: NameExcuse) -> tuple[int, float] | None:
        """The rank of ours for which `order.rank` may be waiting, and how much longer."""
        judge = self._judge
        if judge is None:
            return None
        now = self._clock.now()
        entered_in = entered_of(order)
        if entered_in:
            self._asked_until_s = now + _ASKED_AGAIN_S
        self._look(judge)
        since_s = now - order.waited_s
        stalled = RankPosition(
            _ASKED_RANK, "section", since_s, Limit(0.0, ""), step=order.step, entered_in=entered_in
        )
        return judge.excuse(stalled, now, _SLACK_S)

    def entered_in(self, rank: int) -> Mapping[str, int]:
        """The last collective of each group that a late rank has entered; empty if not known."""
        if self._judge is None:
            return {}
        self._asked_until_s = (
            self._clock.now() + _ASKED_AGAIN_S
        )  # the sampler looks at it until then
        self._look(self._judge)
        place = self._judge.places.get(rank)
        return place.entered_in if isinstance(place, RankPosition) else {}

    def standing(self, rank: int) -> RankStanding | None:
        """The position of a rank now, for beats."""
        judge, watched = self._judge, self._watched.rank(rank)
        if judge is None or watched is None:
            return None
        section, age_s = self._open_section(watched)
        place = judge.places.get(rank)
        limit = place.limit if isinstance(place, RankPosition) else None
        state = states(judge).get(rank, "running")
        entered, entered_s = self._closer.entered(rank), self._closer.signs(rank).collective_s
        if _is_modified(watched.reading()):
            entered_s = None  # the script itself reports its progress
        waits_in = (
            self._closer.collective(rank, place.stopped_s)
            if isinstance(place, RankPosition)
            else None
        )
        return RankStanding(state, section, age_s, limit, entered, entered_s or 0.0, waits_in)

    def sections_seen(self) -> tuple[SectionSeen, ...]:
        """The longest time of each section on this node, since the first step of the round."""
        sections: dict[str, SectionSeen] = {}
        for rank in self._watched.live():
            watched = self._watched.rank(rank)
            if watched is not None:
                for times in seen_by(watched, self.limits):
                    before = sections.get(times.section)
                    sections[times.section] = times if before is None else merged(before, times)
        return tuple(sections.values())

    def _look(self, judge: StallJudge) -> None:
        # A stalled rank may move again and exit at once: its page shows that.
        ranks = {*self._watched.live(), *judge.stalled}
        views = [view for rank in sorted(ranks) for view in self._view(rank, judge)]
        for news in judge.look(views, self._clock.now()):
            match news:
                case Stalled():
                    self._found(news)
                case Moving():
                    self._say(news.stalled.place.rank)
                    self._watched.moving(news)
                case Excused():
                    log.info("stall_excused rank=%d by=%d", news.place.rank, news.by)
        now = self._clock.now()
        self._question(judge, now)
        for rank, unsaid in list(self._unsaid.items()):
            is_over = now - unsaid.found_s >= self._interpreters.within_s
            if not is_over and self._is_worth_waiting(unsaid):
                break  # the first one found is named: findings are reported in their order
            self._say(rank)

    def _question(self, judge: StallJudge, now: float) -> None:
        """Sample all ranks as long as one may be late, here or on a node that asks."""
        before, self._in_question = self._in_question, judge.in_question(now)
        if now < self._asked_until_s:
            self._in_question.add(_ASKED_RANK)
        if self._in_question - before:
            self._closer_due.set()

    def _is_stopped(self, place: RankPosition) -> bool:
        return place.pid is not None and state_of(place.pid, self._proc).is_stopped

    def _found(self, stalled: Stalled) -> None:
        place = stalled.place
        watched = self._watched.rank(place.rank)
        process = state_of(place.pid, self._proc) if place.pid else ProcessState("", "")
        folder = None if watched is None else watched.folder
        self._unsaid[place.rank] = _Unsaid(stalled, process, folder, self._clock.now())

    def _say(self, rank: int) -> None:
        """Report a finding, with what is known by now."""
        unsaid = self._unsaid.pop(rank, None)
        if unsaid is None:
            return
        python = None if unsaid.folder is None else self._interpreters.of(unsaid.folder)
        words = in_words(unsaid.process, python, unsaid.stalled.place.waits_in)
        self._watched.stalled(unsaid.stalled, words)

    def _is_worth_waiting(self, unsaid: _Unsaid) -> bool:
        folder = unsaid.folder
        if folder is None or unsaid.process.is_own_reason:
            return False
        asking = self._interpreters
        return asking.is_asked(folder) or asking.is_open(folder, unsaid.found_s)

    def _to_ask(self, judge: StallJudge) -> Iterator[Path]:
        """Ranks that are nearly late, and those that were not asked in time."""
        for unsaid in self._unsaid.values():
            if unsaid.folder and self._interpreters.is_open(unsaid.folder, unsaid.found_s):
                yield unsaid.folder
        for place in judge.nearly_late(self._clock.now()):
            watched = self._watched.rank(place.rank)
            if watched is not None and self._interpreters.is_open(watched.folder, place.stopped_s):
                yield watched.folder

    async def _ask(self, folder: Path) -> None:
        await self._interpreters.ask(folder)
        if self._unsaid:
            self._due.set()

    def _wake_at(self, judge: StallJudge) -> float:
        """When the loop must wake up again."""
        times = [unsaid.found_s for unsaid in self._unsaid.values()]
        if not times:
            return judge.wake_at
        return min(judge.wake_at, min(times) + self._interpreters.within_s)

    def _view(self, rank: int, judge: StallJudge) -> Iterator[RankView]:
        watched = self._watched.rank(rank)
        if watched is None or (watched.gone and rank not in judge.stalled):
            return
        blank = RankView(
            rank,
            judge.began_s,
            signs=self._closer.signs(rank),
            looked_s=self._closer.looked_s(rank),
            compile_idle_s=self._closer.compile_idle_s(rank),
        )
        try:
            page = watched.page.read()
            self._give_warmup(watched, page)
            if page is None and watched.is_program and self.limits.by_hand(FIRST_STEP) is None:
                return  # it may never show its first step
            lanes = watched.page.lanes() if page is not None else ()
            others = any(lane.frames for lane in lanes[1:])
            threads = threads_of(page.pid, self._proc) if others and page is not None else None
            # read here, where a damaged page and a stalled rank can be distinguished
            sections = {number: watched.page.section(number) for number in _in_use(page, lanes)}
            yield replace(
                blank, page=page, lanes=lanes, threads=threads, section=sections.__getitem__
            )
        except BadPageError as error:
            if rank not in self._troubled:
                self._troubled.add(rank)
                self._watched.say(f"the page of rank {rank} is damaged, and not trusted: {error}")
            yield replace(blank, trouble=str(error))

    def _give_warmup(self, watched: WatchedRank, page: PageReading | None) -> None:
        steps = self.limits.rules.warmup_steps
        if steps is not None and page is not None and page.warmup != steps:
            watched.page.give_warmup(steps)

    def _silent(self) -> dict[int, WatchedRank]:
        """Ranks whose work only other signs can show."""
        judge, now = self._judge, self._clock.now()
        if judge is None:
            return {}
        silent: dict[int, WatchedRank] = {}
        silent_s = silent_after_s(self.limits)
        for rank in self._watched.live():
            watched = self._watched.rank(rank)
            if watched is None or watched.gone:
                continue
            page = watched.reading()
            moved_s = judge.began_s if page is None else page.progress_s
            is_silent = not _is_modified(page) and now - moved_s >= silent_s
            if is_silent or self._in_question:
                silent[rank] = watched
        return silent

    def _compiling(self) -> dict[int, Compiling]:
        """Ranks that compile for longer than the limit of their position."""
        judge, now = self._judge, self._clock.now()
        if judge is None:
            return {}
        return {
            place.rank: Compiling(place.pid, self.limits.idle_compile_s(place.ordinary))
            for place in judge.places.values()
            if isinstance(place, RankPosition)
            and place.pid
            and place.ordinary is not None
            and place.ordinary.s < self.limits.first_step().s
            and place.waited_s(now) >= place.ordinary.s
        }

    def _open_section(self, watched: WatchedRank) -> tuple[str | None, float]:
        try:
            lanes: tuple[LaneReading, ...] = watched.page.lanes()
            if not lanes or not lanes[0].frames:
                return None, 0.0
            frame = lanes[0].frames[-1]
            age_s = max(0.0, self._clock.now() - frame.since_s)
            return watched.page.section(frame.section).name, age_s
        except BadPageError:
            return None, 0.0


def _is_modified(page: PageReading | None) -> bool:
    """Its script uses the SDK, as far as its steps show."""
    return page is not None and page.steps > 0 and page.counted_by is CountedBy.SDK


def _in_use(page: PageReading | None, lanes: Collection[LaneReading]) -> set[int]:
    """The sections that are open, and the time outside of them once it has a limit."""
    numbers = {frame.section for lane in lanes for frame in lane.frames}
    return numbers | {OUTSIDE} if lanes and page is not None and page.steps else numbers
