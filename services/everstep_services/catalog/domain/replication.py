"""Whether the job survives the loss of enough nodes, and which copies would restore that."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from everstep.messages import Holding, ReplicationDegraded, ReplicationRestored, Seat
from everstep.messages.facts.stamp import FactStamp
from everstep_services.catalog.domain.facts import decide
from everstep_services.catalog.domain.index import Index


def survivable(holdings: Iterable[Holding], slots: int) -> tuple[int | None, Mapping[int, int]]:
    """The number of nodes that may be lost, whichever they are, with every slot's state left.

    It is None if the state of a slot is lost already. The mapping has the number for each slot, -1
    for a lost one.
    """
    held = current(holdings)
    each = {slot: _fatal(held.get(slot, ())) - 1 for slot in range(slots)}
    least = min(each.values(), default=-1)
    return (None if least < 0 else least), each


def current(holdings: Iterable[Holding]) -> Mapping[int, tuple[Holding, ...]]:
    """The holdings of each slot that count: those of its newest round."""
    by_slot: dict[int, list[Holding]] = defaultdict(list)
    newest: dict[int, int] = {}
    for holding in holdings:
        by_slot[holding.slot].append(holding)
        newest[holding.slot] = max(newest.get(holding.slot, holding.round), holding.round)
    return {
        slot: tuple(holding for holding in several if holding.round == newest[slot])
        for slot, several in by_slot.items()
    }


def step_held(held: Mapping[int, tuple[Holding, ...]], slots: int) -> int | None:
    """The newest step that every slot has; None if a slot has none."""
    if slots < 1 or any(not held.get(slot) for slot in range(slots)):
        return None
    return min(max(holding.step for holding in held[slot]) for slot in range(slots))


def _fatal(holdings: Collection[Holding]) -> int:
    """The smallest number of nodes whose loss loses the state; 0 if it is lost already."""
    whole = {holding.holder for holding in holdings if holding.parts_needed <= 1}
    parts: dict[str, set[int]] = defaultdict(set)
    needed = 0
    for holding in holdings:
        if holding.parts_needed > 1 and holding.holder not in whole:  # a lost node loses both
            parts[holding.holder].add(holding.part)
            needed = max(needed, holding.parts_needed)
    return len(whole) + _broken_by(list(parts.values()), needed)


def _broken_by(parts: list[set[int]], needed: int) -> int:
    """How many of these nodes must go until the rest have fewer parts than are needed."""
    if len(set().union(*parts)) < needed or not needed:
        return 0
    if sum(map(len, parts)) == len(set().union(*parts)):  # no part is in two places
        left, gone = sum(map(len, parts)), 0
        for size in sorted(map(len, parts), reverse=True):
            if left < needed:
                break
            left, gone = left - size, gone + 1
        return gone
    for gone in range(1, len(parts)):
        for rest in combinations(parts, len(parts) - gone):
            if len(set().union(*rest)) < needed:
                return gone
    return len(parts)


_SLOTS_NAMED = 100


@dataclass(frozen=True, slots=True)
class Repair:
    """A copy to make: `holder` sends a slot's state to the node `to`."""

    slot: int
    step: int
    holder: str
    to: str
    reason: str


def judge(index: Index, wanted: int, after_s: float, now: FactStamp) -> None:
    """Record that too few losses can be survived, once that has lasted; and when it is over."""
    if not index.slots or not index.uses_replicas:
        index.degraded_at = index.survivable_losses = None
        return
    least, each = survivable(index.holdings.values(), index.slots)
    have = -1 if least is None else least
    if have >= wanted:
        _restored(index, have, now)
        return
    if index.degraded_at is None:
        index.degraded_at = now.wall
    if (now.wall - index.degraded_at).total_seconds() < after_s or index.survivable_losses == have:
        return
    index.survivable_losses = have
    weak = weak_slots(each, wanted)
    decide(
        index,
        ReplicationDegraded(
            **now.head(index.job),
            round=index.round,
            wanted_losses=wanted,
            survivable_losses=max(have, 0),
            reason=_reason(weak, each, wanted),
            slots=tuple(weak[:_SLOTS_NAMED]),
        ),
        now,
    )


def is_quiet(index: Index, wanted: int) -> bool:
    """The job can survive enough losses, as before: there is nothing to record."""
    least, _ = survivable(index.holdings.values(), index.slots)
    return index.degraded_at is None and least is not None and least >= wanted


def weak_slots(each: Mapping[int, int], wanted: int) -> Sequence[int]:
    """The slots whose state survives too few losses."""
    return [slot for slot, losses in each.items() if losses < wanted]


def repairs(index: Index, wanted: int, seats: Sequence[Seat]) -> Sequence[Repair]:
    """One copy for each weak slot, from a node that holds its state to a node that can take it."""
    _, each = survivable(index.holdings.values(), index.slots)
    held = current(index.holdings.values())
    load = Counter(holding.holder for several in held.values() for holding in several)
    copies: list[Repair] = []
    for slot in weak_slots(each, wanted):
        repair = _repair(slot, held.get(slot, ()), seats, load)
        if repair is not None:
            load[repair.to] += 1
            copies.append(repair)
    return copies


def _repair(
    slot: int, held: Iterable[Holding], seats: Sequence[Seat], load: Counter[str]
) -> Repair | None:
    here = {seat.node: seat for seat in seats if seat.replica_port and seat.stage == "running"}
    have = {holding.holder for holding in held}
    sources = [holding for holding in held if holding.parts_needed <= 1 and holding.holder in here]
    if not sources:
        return None
    domains = {here[node].failure_domain for node in have if node in here} - {""}
    others = [seat for node, seat in here.items() if node not in have]
    if not others:
        return None
    source = max(sources, key=lambda holding: (holding.step, holding.holder))
    to = min(
        others,
        key=lambda seat: (seat.failure_domain in domains, load[seat.node], seat.node),
    )
    return Repair(
        slot,
        source.step,
        source.holder,
        to.node,
        f"the state of slot {slot} is on {', '.join(sorted(have))} only",
    )


def _restored(index: Index, have: int, now: FactStamp) -> None:
    if index.degraded_at is not None and index.survivable_losses is not None:
        decide(
            index,
            ReplicationRestored(
                **now.head(index.job),
                round=index.round,
                survivable_losses=have,
                degraded_s=round((now.wall - index.degraded_at).total_seconds(), 3),
            ),
            now,
        )
    index.degraded_at = index.survivable_losses = None


def _reason(weak: Sequence[int], each: Mapping[int, int], wanted: int) -> str:
    lost = [slot for slot in weak if each[slot] < 0]
    named = ", ".join(map(str, weak[:10])) + (" …" if len(weak) > 10 else "")
    if lost:
        gone = ", ".join(map(str, lost[:10])) + (" …" if len(lost) > 10 else "")
        return f"no node has the state of slot {gone} any more: a restore falls back to files"
    return (
        f"slots {named}: the loss of {min(each[slot] for slot in weak) + 1} node(s) would lose "
        f"their state, although {wanted} should be survived; the catalog asks for copies"
    )
