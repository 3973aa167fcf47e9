"""Every second of an allocation in exactly one class. Pure.

Sums are exact: what is taken for one class is taken from another, so that all classes of an
allocation add up to its wall clock.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from everstep_services.history.goodput.trace import (
    AllocationTrace,
    GoodputTrace,
    RoundTrace,
    SlowRankTrace,
)

TimeClass = Literal[
    "productive", "start_up", "rendezvous", "restore", "heal", "checkpoint_stall", "stall",
    "lost_steps", "straggler_tax", "idle", "unknown",
]  # fmt: skip
CLASSES: tuple[TimeClass, ...] = get_args(TimeClass)

FRESH_S = 90.0
"""Steps are reported once a minute: for this time after a report, training counts as going on."""
_GOOD_ENDS = frozenset({"done", "preempted"})


@dataclass(frozen=True, slots=True)
class LedgerSegment:
    """A time in one class, before the cost of slow ranks is taken from it."""

    from_s: float
    until_s: float
    time_class: TimeClass
    round: int | None = None
    tax_ratio: float = 0.0
    """The share of a productive time that was lost to slow ranks."""

    @property
    def lasted_s(self) -> float:
        """Its length."""
        return self.until_s - self.from_s


def segments(trace: GoodputTrace, now_s: float) -> list[LedgerSegment]:
    """The time of all of a job's allocations until now, in order, without gaps within one."""
    parts = [
        part
        for number, allocation in enumerate(trace.allocations)
        for part in _parts(allocation, trace, _end_s(trace, number, now_s))
    ]
    backs = [it for it in trace.closings.values() if it.went_back_s is not None]
    parts = list(_cut(parts, sorted(it.went_back_s for it in backs if it.went_back_s is not None)))
    for allocation in trace.allocations:
        for here in allocation.rounds.values():
            for back in backs:
                if back.next_round == here.number and back.went_back_s is not None:
                    lost_s = (back.lost_steps or 0) * _step_s(parts, trace, here, is_own=True)
                    _take_lost_steps(parts, back.went_back_s, lost_s)
            if here.formed_s is not None:
                _take_lost_steps(parts, here.formed_s, _lost_s(parts, here, trace))
    return _taxed([part for part in parts if part.lasted_s > 0], trace)


def seconds(
    parts: Iterable[LedgerSegment], since_s: float = float("-inf"), until_s: float = float("inf")
) -> dict[TimeClass, float]:
    """How long each class lasted within a window."""
    sums: dict[TimeClass, float] = dict.fromkeys(CLASSES, 0.0)
    for part in parts:
        lasted_s = min(part.until_s, until_s) - max(part.from_s, since_s)
        if lasted_s > 0:
            sums[part.time_class] += lasted_s * (1 - part.tax_ratio)
            sums["straggler_tax"] += lasted_s * part.tax_ratio
    return sums


def productive_ratio(sums: Mapping[TimeClass, float]) -> float | None:
    """The productive share; None where no time has passed, or nobody saw a step."""
    wall_s = sum(sums.values())
    is_known = wall_s > 0 and (sums["productive"] > 0 or not sums["unknown"])
    return sums["productive"] / wall_s if is_known else None


def _end_s(trace: GoodputTrace, number: int, now_s: float) -> float:
    """When an allocation ended: at the latest when the next one began."""
    allocation = trace.allocations[number]
    following = trace.allocations[number + 1 :]
    if following:
        ended_s = allocation.ended_s
        next_s = following[0].started_s
        return next_s if ended_s is None else min(ended_s, next_s)
    return max(now_s, allocation.heard_s) if allocation.ended_s is None else allocation.ended_s


def _parts(
    allocation: AllocationTrace, trace: GoodputTrace, end_s: float
) -> Iterator[LedgerSegment]:
    """An allocation's time, before lost steps and slow ranks are taken from it."""
    known_s = min(allocation.heard_s, end_s) if allocation.is_lost else end_s
    at_s = allocation.started_s
    rounds = sorted(
        (round_ for round_ in allocation.rounds.values() if round_.formed_s is not None),
        key=lambda round_: round_.number,
    )
    waits: TimeClass = "rendezvous"
    for place, here in enumerate(rounds):
        assert here.formed_s is not None
        yield LedgerSegment(at_s, max(here.formed_s, at_s), waits)
        at_s = max(here.formed_s, at_s)
        following = rounds[place + 1].formed_s if place + 1 < len(rounds) else None
        limit_s = known_s if following is None else min(following, known_s)
        is_over = here.ended_s is not None or following is not None
        until_s = limit_s if here.ended_s is None else min(here.ended_s, limit_s)
        yield from _of_round(here, trace, at_s, max(until_s, at_s), is_over=is_over)
        at_s = max(until_s, at_s)
        waits = "idle" if here.end_cause in _GOOD_ENDS else "rendezvous"
    if trace.job_ended_s is not None and at_s < trace.job_ended_s < known_s:
        yield LedgerSegment(at_s, trace.job_ended_s, waits)
        at_s, waits = trace.job_ended_s, "idle"
    elif trace.job_ended_s is not None and trace.job_ended_s <= at_s:
        waits = "idle"
    is_training = bool(rounds) and rounds[-1].ended_s is None
    yield LedgerSegment(at_s, max(known_s, at_s), "unknown" if is_training else waits)
    yield LedgerSegment(max(known_s, at_s), max(end_s, at_s), "unknown")


def _of_round(
    here: RoundTrace, trace: GoodputTrace, from_s: float, until_s: float, *, is_over: bool
) -> Iterator[LedgerSegment]:
    """The parts of a round, from its forming until its end."""

    def within(at_s: float | None, least_s: float) -> float:
        return until_s if at_s is None else min(max(at_s, least_s), until_s)

    number = here.number
    begun_s = from_s
    if here.restored_s is not None:
        restored_s = within(here.restored_s, from_s)
        restoring_s = max(restored_s - here.restore_took_s, within(here.started_s, from_s))
        restoring_s = min(restoring_s, restored_s)
        yield LedgerSegment(from_s, restoring_s, "start_up", number)
        came: TimeClass = "heal" if here.is_healed else "restore"
        yield LedgerSegment(restoring_s, restored_s, came, number)
        begun_s = restored_s
    is_blind = here.first_step_s is None and trace.shows_no_steps
    first_s = within(here.started_s if is_blind else here.first_step_s, begun_s)
    yield LedgerSegment(begun_s, first_s, "start_up", number)
    if here.first_step_s is None or here.last_step_s is None:
        yield LedgerSegment(first_s, until_s, "unknown", number)
        return
    last_s = within(here.last_step_s, first_s)
    closing = trace.closings.get(here.incident or "")
    if is_over and closing is not None:
        last_s = max(first_s, until_s - closing.still_s)
    elif not is_over:
        last_s = until_s if here.standing else min(until_s, last_s + FRESH_S)
    yield from _trained(here, first_s, last_s)
    if is_over:
        yield LedgerSegment(
            last_s, until_s, "idle" if here.end_cause in _GOOD_ENDS else "stall", number
        )
    else:
        yield LedgerSegment(last_s, until_s, "unknown", number)


def _trained(here: RoundTrace, from_s: float, until_s: float) -> Iterator[LedgerSegment]:
    """The time in which steps were made, with the parts that stalls and saves took."""
    holds: list[tuple[float, float, TimeClass]] = [
        *((begun_s, over_s, "stall") for begun_s, over_s in here.stalls),
        *((begun_s, until_s, "stall") for begun_s in here.standing.values()),
        *((at_s, at_s + held_s, "checkpoint_stall") for at_s, held_s in here.saves.values()),
    ]
    at_s = from_s
    for begun_s, over_s, time_class in sorted(holds):
        begun, over = min(max(begun_s, at_s), until_s), min(max(over_s, at_s), until_s)
        yield LedgerSegment(at_s, begun, "productive", here.number)
        yield LedgerSegment(begun, over, time_class, here.number)
        at_s = over
    yield LedgerSegment(at_s, until_s, "productive", here.number)


def _take_lost_steps(parts: list[LedgerSegment], before_s: float, left_s: float) -> None:
    """Steps that had to be made again: the last that were made before."""
    place = bisect_left(parts, before_s, key=lambda part: part.from_s) - 1
    while place >= 0 and left_s > 0:
        part = parts[place]
        if part.time_class == "productive" and part.until_s <= before_s:
            taken_s = min(left_s, part.lasted_s)
            cut_s = part.until_s - taken_s
            parts[place : place + 1] = [
                replace(part, until_s=cut_s),
                replace(part, from_s=cut_s, time_class="lost_steps"),
            ]
            left_s -= taken_s
        place -= 1


def _lost_s(parts: Sequence[LedgerSegment], here: RoundTrace, trace: GoodputTrace) -> float:
    closings = [
        closing
        for closing in trace.closings.values()
        if closing.next_round == here.number and closing.went_back_s is None
    ]
    if lost_s := sum(closing.lost_s for closing in closings):
        return lost_s
    lost_steps = here.lost_steps or sum(closing.lost_steps or 0 for closing in closings)
    return lost_steps * _step_s(parts, trace, here, is_own=False) if lost_steps else 0.0


def _step_s(
    parts: Sequence[LedgerSegment], trace: GoodputTrace, here: RoundTrace, *, is_own: bool
) -> float:
    """How long a step took: in this round if `is_own`, else in one before it, if possible."""
    timed = [
        round_
        for allocation in trace.allocations
        for round_ in allocation.rounds.values()
        if round_.number <= here.number and round_.steps
    ]
    if not timed:
        return 0.0
    last = max(timed, key=lambda round_: ((round_ is here) == is_own, round_.number))
    # Its steps were counted until that moment, and a stall among them made none.
    until_s = last.last_step_s or 0.0
    stood_s = sum(
        max(min(part.until_s, until_s) - part.from_s, 0.0)
        for part in parts
        if part.round == last.number and part.time_class == "stall"
    )
    return max(last.steps_took_s - stood_s, 0.0) / last.steps


def _taxed(parts: list[LedgerSegment], trace: GoodputTrace) -> list[LedgerSegment]:
    """What slow ranks cost, spread over the productive time in which they were slow."""
    ends = {
        here.number: here.ended_s
        for allocation in trace.allocations
        for here in allocation.rounds.values()
        if here.ended_s is not None
    }
    spans = [(slow, slow.found_s, _over_s(slow, ends)) for slow in trace.slow_ranks.values()]
    parts = list(_cut(parts, sorted({at_s for _, *span in spans for at_s in span})))
    for slow, from_s, until_s in spans:
        first = bisect_left(parts, from_s, key=lambda part: part.from_s)
        last = bisect_left(parts, until_s, key=lambda part: part.from_s)
        inside = [at for at in range(first, last) if parts[at].time_class == "productive"]
        ratio = _tax_ratio(slow, sum(parts[at].lasted_s for at in inside))
        for at in inside:
            parts[at] = replace(parts[at], tax_ratio=min(1.0, parts[at].tax_ratio + ratio))
    return parts


def _over_s(slow: SlowRankTrace, ends: Mapping[int, float]) -> float:
    """When a rank was no longer slow: a finding is over with its round."""
    until_s = ends.get(slow.round, float("inf"))
    return until_s if slow.cleared_s is None else min(slow.cleared_s, until_s)


def _tax_ratio(slow: SlowRankTrace, total_s: float) -> float:
    if slow.lost_s is not None:
        return min(1.0, max(slow.lost_s, 0.0) / total_s) if total_s > 0 else 0.0
    return slow.slowdown_ratio / (1 + slow.slowdown_ratio)


def _cut(parts: Sequence[LedgerSegment], moments_s: Sequence[float]) -> Iterator[LedgerSegment]:
    """The same segments, cut at each of these moments, which are sorted."""
    for part in parts:
        from_s = part.from_s
        first = bisect_right(moments_s, part.from_s)
        for moment_s in moments_s[first : bisect_left(moments_s, part.until_s)]:
            yield replace(part, from_s=from_s, until_s=moment_s)
            from_s = moment_s
        yield replace(part, from_s=from_s) if from_s != part.from_s else part
