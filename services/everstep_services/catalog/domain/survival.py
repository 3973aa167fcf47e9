"""How many nodes may be lost before a state in memory is lost, from which node holds what."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations

from everstep.messages import Holding


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
