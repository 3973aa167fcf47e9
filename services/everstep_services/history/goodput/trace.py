"""Collects from a job's facts how its time was spent. Pure.

Facts come in stream order. What is learned late (an incident's ledger, when a slow rank was
cleared) belongs to earlier time. So facts are only collected here, and `segments` puts the time
together.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.messages import (
    AllocationEnded,
    AllocationStarted,
    CheckpointCommitted,
    CheckpointRestored,
    Fact,
    FreshStarted,
    IncidentClosed,
    JobEnded,
    ProgressMade,
    RankRecovered,
    RankStalled,
    RoundEnded,
    RoundFormed,
    RoundStarted,
    ShardsWritten,
    StateHealed,
    StragglerCleared,
    StragglerFound,
)

_FROM_RENDEZVOUS = (
    AllocationStarted, AllocationEnded, RoundFormed, RoundStarted, RoundEnded, IncidentClosed,
    JobEnded,
)  # fmt: skip
"""Facts of one service, whose clock bounds the times of all others."""


@dataclass(slots=True)
class RoundTrace:
    """The course of one round. Times are in seconds since 1970."""

    number: int
    formed_s: float | None = None
    started_s: float | None = None
    restored_s: float | None = None
    restore_took_s: float = 0.0
    is_healed: bool = False
    """Ranks have gone on with the state in their memory: that time was not a restore."""
    first_step_s: float | None = None
    lost_steps: int = 0
    """Steps made in earlier rounds that had to be made again."""
    last_step_s: float | None = None
    """When the newest step was reported."""
    steps: int = 0
    """The steps after its first, and how long they took."""
    steps_took_s: float = 0.0
    ended_s: float | None = None
    end_cause: str = ""
    incident: str | None = None
    saves: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By step: when saving began to hold the training up, and for how long."""
    stalls: list[tuple[float, float]] = field(default_factory=list)
    """The times in which a rank stood still and then moved again."""
    standing: dict[int, float] = field(default_factory=dict)
    """Since when each rank has stood that did not move again in this round."""


@dataclass(slots=True)
class AllocationTrace:
    """A time in which nodes were there for the job."""

    name: str
    started_s: float
    ended_s: float | None = None
    is_lost: bool = False
    heard_s: float = 0.0
    """When anything was last reported in it."""
    rounds: dict[int, RoundTrace] = field(default_factory=dict)


@dataclass(slots=True)
class SlowRankTrace:
    """A rank that was found to be slow, until it was cleared."""

    round: int
    found_s: float
    slowdown_ratio: float
    cleared_s: float | None = None
    lost_s: float | None = None


@dataclass(frozen=True, slots=True)
class Closing:
    """What an incident cost, as its ledger says."""

    still_s: float
    """From the last progress to the first report."""
    lost_s: float
    lost_steps: int | None
    next_round: int | None
    went_back_s: float | None = None
    """When the training went back within the round, to make these steps again."""


@dataclass(slots=True)
class GoodputTrace:
    """How a job's time was spent, as its facts report it."""

    allocations: list[AllocationTrace] = field(default_factory=list)
    closings: dict[str, Closing] = field(default_factory=dict)
    slow_ranks: dict[str, SlowRankTrace] = field(default_factory=dict)
    job_ended_s: float | None = None
    newest_s: float = 0.0

    def take(self, facts: Iterable[Fact], received_s: Iterable[float] | None = None) -> None:
        """Add facts, in stream order, with when each was received."""
        taken = list(facts)
        bounds = [float("inf")] * len(taken) if received_s is None else list(received_s)
        times = _times(taken, bounds, self.newest_s)
        for fact, at_s in zip(taken, times, strict=True):
            _TAKERS[type(fact)](self, fact, at_s)
            self.newest_s = at_s
            if self.allocations:
                self.allocations[-1].heard_s = max(self.allocations[-1].heard_s, at_s)

    @property
    def shows_no_steps(self) -> bool:
        """A round ended well, and nobody saw a step of it: it had its time for something else."""
        rounds = (it for allocation in self.allocations for it in allocation.rounds.values())
        return any(it.end_cause == "done" and it.first_step_s is None for it in rounds)

    def round(self, number: int) -> RoundTrace | None:
        """A round of the newest allocation; None where nothing began an allocation."""
        if not self.allocations:
            return None
        for allocation in reversed(self.allocations[-2:]):
            if number in allocation.rounds:
                return allocation.rounds[number]
        rounds = self.allocations[-1].rounds
        return rounds.setdefault(number, RoundTrace(number))


def _times(facts: list[Fact], received_s: list[float], not_before_s: float) -> list[float]:
    """The time of each fact, in an order that agrees with the stream's.

    A node's clock may be wrong: what it reports is held between what rendezvous sent before and
    after it, and before it was received.
    """
    latest: list[float] = []
    bound = float("inf")
    for fact, by_s in zip(reversed(facts), reversed(received_s), strict=True):
        at_s = min(fact.at.timestamp(), by_s, bound)
        if isinstance(fact, _FROM_RENDEZVOUS):
            bound = at_s
        latest.append(at_s)
    times: list[float] = []
    for at_s in reversed(latest):
        not_before_s = max(not_before_s, at_s)
        times.append(not_before_s)
    return times


def _allocation_started(trace: GoodputTrace, fact: AllocationStarted, at_s: float) -> None:
    if any(allocation.name == fact.allocation for allocation in trace.allocations):
        return
    trace.allocations.append(AllocationTrace(fact.allocation, at_s, heard_s=at_s))


def _allocation_ended(trace: GoodputTrace, fact: AllocationEnded, at_s: float) -> None:
    for allocation in trace.allocations:
        if allocation.name == fact.allocation and allocation.ended_s is None:
            allocation.ended_s = at_s
            allocation.is_lost = fact.state == "lost"


def _round_formed(trace: GoodputTrace, fact: RoundFormed, at_s: float) -> None:
    if not trace.allocations:
        trace.allocations.append(AllocationTrace(fact.allocation, at_s, heard_s=at_s))
    here = trace.round(fact.round)
    if here is not None and here.formed_s is None:
        here.formed_s = at_s


def _round_started(trace: GoodputTrace, fact: RoundStarted, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is not None and here.started_s is None:
        here.started_s = at_s


def _restored(trace: GoodputTrace, fact: CheckpointRestored | FreshStarted, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is None or here.restored_s is not None or here.first_step_s is not None:
        return  # a script may load again while it trains
    here.restored_s = at_s
    here.restore_took_s = fact.took_s if isinstance(fact, CheckpointRestored) else 0.0


def _healed(trace: GoodputTrace, fact: StateHealed, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is not None and not fact.rank and here.first_step_s is None:
        here.restored_s, here.restore_took_s, here.is_healed = at_s, fact.took_s, True


def _progress(trace: GoodputTrace, fact: ProgressMade, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is None:
        return
    at_s = at_s if here.ended_s is None else min(at_s, here.ended_s)  # reported when ranks stopped
    if here.first_step_s is None:
        # The first report may be of many steps: the training was there when they began.
        made_s = fact.steps_s * max(fact.steps - 1, 0) / max(fact.steps, 1)
        earliest_s = max(here.restored_s or 0.0, here.started_s or 0.0, here.formed_s or 0.0)
        here.first_step_s = max(at_s - made_s, min(earliest_s, at_s))
        here.lost_steps = fact.lost_steps
        counted, counted_s = max(fact.steps - 1, 0), made_s  # its first step has the start in it
    else:
        counted, counted_s = fact.steps, fact.steps_s
    here.last_step_s = max(at_s, here.last_step_s or at_s)
    here.steps += counted
    here.steps_took_s += counted_s


def _round_ended(trace: GoodputTrace, fact: RoundEnded, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is not None and here.ended_s is None:
        here.ended_s, here.end_cause, here.incident = at_s, fact.cause, fact.incident


def _saved(trace: GoodputTrace, fact: CheckpointCommitted | ShardsWritten, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is None or not fact.stall_s > 0:
        return
    lag_s = fact.lag_s if isinstance(fact, CheckpointCommitted) else fact.write_s + fact.hash_s
    began_s = at_s - max(lag_s, fact.stall_s)
    _, known_s = here.saves.get(fact.step, (began_s, 0.0))
    if fact.stall_s > known_s:  # the copies of a state cost the training once
        here.saves[fact.step] = (began_s, fact.stall_s)


def _stalled(trace: GoodputTrace, fact: RankStalled, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is not None and here.ended_s is None:
        here.standing[fact.rank] = at_s - fact.waited_s


def _recovered(trace: GoodputTrace, fact: RankRecovered, at_s: float) -> None:
    here = trace.round(fact.round)
    if here is None:
        return
    here.standing.pop(fact.rank, None)
    if fact.stalled_s > 0:
        here.stalls.append((at_s - fact.stalled_s, at_s))


def _closed(trace: GoodputTrace, fact: IncidentClosed, at_s: float) -> None:
    if fact.outcome != "merged":
        still_s = fact.ledger.unfinished_s + fact.ledger.detect_s
        is_back = fact.lost_steps and fact.next_round == fact.round
        back_s = at_s - fact.ledger.wall_s if is_back else None
        closing = Closing(still_s, fact.lost_s, fact.lost_steps, fact.next_round, back_s)
        trace.closings[fact.incident] = closing


def _slow(trace: GoodputTrace, fact: StragglerFound, at_s: float) -> None:
    trace.slow_ranks[fact.id] = SlowRankTrace(
        fact.round, at_s, max(fact.slowdown_ratio or 0.0, 0.0)
    )


def _cleared(trace: GoodputTrace, fact: StragglerCleared, at_s: float) -> None:
    slow = trace.slow_ranks.get(fact.finding)
    if slow is not None and slow.cleared_s is None:
        slow.cleared_s, slow.lost_s = at_s, fact.lost_s


def _job_ended(trace: GoodputTrace, _: JobEnded, at_s: float) -> None:
    trace.job_ended_s = at_s
    for allocation in trace.allocations:
        for here in allocation.rounds.values():
            here.ended_s = at_s if here.ended_s is None else here.ended_s


_TAKERS: Mapping[type[Fact], Callable[[GoodputTrace, Any, float], None]] = {
    AllocationStarted: _allocation_started,
    AllocationEnded: _allocation_ended,
    RoundFormed: _round_formed,
    RoundStarted: _round_started,
    CheckpointRestored: _restored,
    FreshStarted: _restored,
    StateHealed: _healed,
    ProgressMade: _progress,
    RoundEnded: _round_ended,
    CheckpointCommitted: _saved,
    ShardsWritten: _saved,
    RankStalled: _stalled,
    RankRecovered: _recovered,
    IncidentClosed: _closed,
    StragglerFound: _slow,
    StragglerCleared: _cleared,
    JobEnded: _job_ended,
}

KINDS = tuple(_TAKERS)
"""The facts that goodput follows from."""
