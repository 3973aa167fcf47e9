"""The progress of this node's ranks: for beats, for progress facts, for reports."""

from collections.abc import Iterator
from dataclasses import dataclass

from everstep.clock import Clock
from everstep.lost_steps import steps_again, steps_again_in_words
from everstep.messages import (
    NodeBeat,
    ProgressMade,
    RankBeat,
    SectionLimit,
    StartRanks,
    WardenPlace,
)
from everstep.messages.facts.ranks import ranks_in_words
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.liveness_port import LivenessPort
from everstep_services.agent.ranks.protocol import RankRuns, StartKind
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.stalls.monitor import RankStanding, StallMonitor
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.step_figures import (
    NO_FIGURES,
    StepCounter,
    StepFigures,
    read_figures,
)
from trainer_sdk.page_content import CountedBy, PageReading

_LONGEST_S = 1e9
_SECTIONS_EVERY = 10
"""Beats."""


@dataclass(eq=False, repr=False)
class ProgressReader:
    """Reads the pages of the ranks from outside; the ranks need not answer."""

    _plan: RunPlan
    _agent: Agent
    _source: RankSource
    _records: AgentFacts
    _clock: Clock
    _stalls: StallMonitor
    """Knows where ranks are, and whether they are paused or have stalled."""

    def __post_init__(self) -> None:
        self.step, self.pids = self._source.step, self._source.pids
        self._sequence = 0
        self._order: StartRanks | None = None
        self._steps = StepCounter(self._clock)
        self._last_step: int | None = None
        self._is_later = False
        """Whether the job has made steps before: what the SDK counts anew is then no number."""
        self._told_limits: tuple[SectionLimit, ...] = ()
        self._starts: dict[int, StartKind] = {}

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started here."""
        self._order = order
        self._steps.begins()
        self._starts = {}
        self._last_step = None
        self._is_later = order.reached_step is not None

    @property
    def warm_ranks(self) -> int:
        """How many ranks of the round were forked from a warm process."""
        return sum(start == "warm" for start in self._starts.values())

    def runs(self, event: RankRuns) -> str:
        """A rank has started. Returns what people must know once all have, if some were kept."""
        self._starts[event.rank] = event.start
        anew = sorted(rank for rank, start in self._starts.items() if start != "kept")
        kept = len(self._starts) - len(anew)
        if self._order is None or len(self._starts) < self._order.ranks or not kept:
            return ""
        told = f"round {event.round}: {kept} {'rank goes' if kept == 1 else 'ranks go'} on"
        if anew:
            verb = "starts" if len(anew) == 1 else "start"
            told += f", {ranks_in_words(anew, len(anew))} {verb} anew"
        return told

    def stepped(self, order: StartRanks, rank: int, step: int) -> ProgressMade | None:
        """The fact that the training steps again, from slot 0: a rank has made its first step."""
        made = self._steps.first(step) if order.slot == 0 else None
        if made is None:
            return None
        return self._records.progress_made(
            order.round, made, is_counted_anew=not self.is_numbered(rank),
            lost_steps=steps_again(self._numbered(rank, step), order.reached_step) or 0,
            figures=self._figures(order.first_rank, 1),
        )  # fmt: skip

    def went_back(self, steps: int) -> None:
        """The training has gone back within its round, and makes these steps again."""
        self._steps.went_back(steps)

    def steps_again(self, order: StartRanks, rank: int, step: int) -> str:
        """What people must know of the first step of a round; empty for nothing."""
        return steps_again_in_words(order.round, self._numbered(rank, step), order.reached_step)

    def is_numbered(self, rank: int) -> bool:
        """Whether the script of this rank numbers its steps; otherwise they count anew."""
        page = self._source.page(rank)
        return page is not None and page.is_numbered

    def survives(self, rank: int | None) -> int:
        """As `Report.survives`, as the script of this rank tells."""
        page = None if rank is None else self._source.page(rank)
        return 0 if page is None else page.survives

    def _numbered(self, rank: int, step: int) -> int | None:
        return step if self.is_numbered(rank) else None

    def last_step(self) -> int | None:
        """The highest step of our ranks in this round, if the SDK counts on from the job's first.

        A script that gives no numbers is counted anew in each round, wherever it resumes.
        """
        steps = [
            page.step
            for page in self._pages()
            if page.counted_by is CountedBy.SDK and (page.is_numbered or not self._is_later)
        ]
        if steps:
            self._last_step = (
                max(steps) if self._last_step is None else max(*steps, self._last_step)
            )
        return self._last_step

    def age_s(self) -> float | None:
        """Seconds since any rank of ours last moved, in a round that has made steps."""
        moved = [page.progress_s for page in self._pages() if page.steps]
        return max(0.0, self._clock.now() - max(moved)) if moved else None

    def facts(self) -> Iterator[ProgressMade]:
        """Once a minute, while steps are made, the number of steps and their time; from slot 0."""
        if self._order is not None:
            yield from self._progressed(self._order)

    def ends(self) -> Iterator[ProgressMade]:
        """The last step of a round, unless it was reported already."""
        self.last_step()  # rendezvous asks for it when the ranks are gone
        order, self._order = self._order, None
        if order is not None:
            yield from self._progressed(order, is_last=True)

    def beat(
        self, *, cut_off: bool, door: LivenessPort | None = None, alive: tuple[str, ...] = ()
    ) -> NodeBeat:
        """The beat of this moment."""
        self._sequence += 1
        agent = self._agent
        order = agent.order
        teaches = order is not None and not self._sequence % _SECTIONS_EVERY
        limits = self._limits_to_tell(order, is_due=teaches)
        return NodeBeat(
            job=self._plan.job,
            node=self._plan.node,
            sequence=self._sequence,
            at=self._clock.wall(),
            state="cut_off" if cut_off else agent.state,
            round=agent.round if order is None else order.round,
            slot=None if order is None else order.slot,
            ranks=tuple(self._rank(rank) for rank in self._ranks()),
            watch=self._stalls.state,
            sections=self._stalls.sections_seen() if teaches else (),
            config_fingerprint=self._plan.spec.config_fingerprint if teaches else "",
            limits=limits,
            warden=None if door is None else self._warden(door),
            alive=alive,
        )

    def _warden(self, door: LivenessPort) -> WardenPlace:
        return WardenPlace(
            node=self._plan.node, address=door.address, port=door.port, token=door.token
        )

    def _limits_to_tell(
        self, order: StartRanks | None, *, is_due: bool
    ) -> tuple[SectionLimit, ...]:
        """The limits that slot 0 tells for its job: with every tenth beat, and when they change."""
        if order is None or order.slot != 0:
            return ()
        limits = self._stalls.in_force()
        if limits == self._told_limits and not is_due:
            return ()
        self._told_limits = limits
        return limits

    def _progressed(self, order: StartRanks, *, is_last: bool = False) -> Iterator[ProgressMade]:
        step = self.step(order.first_rank)
        made = self._steps.since(step, is_last=is_last) if order.slot == 0 else None
        if made is not None:
            yield self._records.progress_made(
                order.round, made, is_counted_anew=not self.is_numbered(order.first_rank),
                figures=self._figures(order.first_rank, made.steps),
            )  # fmt: skip

    def _figures(self, rank: int, steps: int) -> StepFigures:
        rank_watch = self._source.watched(rank)
        return NO_FIGURES if rank_watch is None else read_figures(rank_watch.page, steps)

    def _rank(self, rank: int) -> RankBeat:
        page, standing = self._source.page(rank), self._stalls.standing(rank)
        return beat_of(rank, page, standing, self._clock.now())

    def _pages(self) -> list[PageReading]:
        pages = (self._source.page(rank) for rank in self._ranks())
        return [page for page in pages if page is not None]

    def _ranks(self) -> range:
        order = self._agent.order
        if order is None:
            return range(0)
        return range(order.first_rank, order.first_rank + order.ranks)


def beat_of(
    rank: int, page: PageReading | None, standing: RankStanding | None, now: float
) -> RankBeat:
    """The beat of one rank, from its page and from the monitor of stalls."""
    is_starting = page is None or not (page.step or page.beats)
    if page is None or standing is None:
        return RankBeat(rank=rank, state="starting" if is_starting else "running")
    state = standing.state
    limit = standing.limit
    progress_s = max(page.progress_s, standing.collective_s)
    return RankBeat(
        rank=rank,
        state="starting" if is_starting and state == "running" else state,
        step=page.step or None,
        progress_age_s=0.0 if is_starting else _told_s(now - progress_s),
        section=standing.section,
        section_age_s=_told_s(standing.section_age_s),
        limit_s=None if limit is None else _told_s(limit.s),
        limit_source="" if limit is None else limit.source,
        limit_name="" if limit is None or limit.name == standing.section else limit.name,
        collectives=standing.collectives,
        collective=standing.collective,
    )


def _told_s(seconds: float) -> float:
    """A time within the bounds of messages: a rank that damages its page must not silence all."""
    return round(min(max(0.0, seconds), _LONGEST_S), 3)
