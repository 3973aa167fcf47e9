"""Which nodes keep a slot's state in their memory, beside its own. Pure.

Slots form cliques, and each state is kept within its own: what several nodes held is lost only if
they were of one clique, which is the fewest combinations that there can be.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Place:
    """A slot whose node can hold states."""

    slot: int
    domain: str = ""
    """What fails together with its node; empty for nothing but itself."""


def cliques(
    places: Sequence[Place], factor: int, jump: int | None, before: Mapping[int, int]
) -> dict[int, int]:
    """The clique of each slot, by number: at least `factor` slots each, of different domains.

    What was before stays, unless other cliques mix fewer domains: each state that changes its
    place is sent anew. With a `jump`, slots that are so far apart belong together, as in NVRx.
    """
    factor = min(factor, len(places))
    if factor < 2:
        return {}
    if jump is not None:
        slots = sorted(place.slot for place in places)
        return _by_jump(slots, factor, min(jump, len(slots) // factor))
    ordered = sorted(places, key=lambda place: (place.domain, place.slot))
    # Neighbours in that order share a domain: the farther apart, the less likely.
    fresh = _by_jump([place.slot for place in ordered], factor, len(places) // factor)
    domains = {place.slot: place.domain for place in places}
    if _fits(before, fresh, factor) and _mixed(before, domains) <= _mixed(fresh, domains):
        return dict(before)
    return fresh


class Neighbours:
    """Who is in a clique with whom."""

    def __init__(self, of: Mapping[int, int]) -> None:
        self._of = of
        self._in: dict[int, list[int]] = defaultdict(list)
        for slot in sorted(of):
            self._in[of[slot]].append(slot)

    def after(self, slot: int) -> tuple[int, ...]:
        """The others of a slot's clique, in turn: the first ones keep its state."""
        if slot not in self._of:
            return ()
        found = self._in[self._of[slot]]
        at = found.index(slot)
        return (*found[at + 1 :], *found[:at])


def _by_jump(slots: Sequence[int], factor: int, jump: int) -> dict[int, int]:
    """Blocks of `jump * factor`, in each those that are `jump` apart; the rest joins the last."""
    blocks = max(len(slots) // (jump * factor), 1)
    return {
        slot: min(at // (jump * factor), blocks - 1) * jump + at % jump
        for at, slot in enumerate(slots)
    }


def _fits(before: Mapping[int, int], fresh: Mapping[int, int], factor: int) -> bool:
    sizes = Counter(before.values())
    return before.keys() == fresh.keys() and min(sizes.values()) >= factor


def _mixed(of: Mapping[int, int], domains: Mapping[int, str]) -> int:
    """How many slots are in a clique with another of their domain."""
    found: dict[int, list[str]] = defaultdict(list)
    for slot, clique in of.items():
        if domains[slot]:
            found[clique].append(domains[slot])
    return sum(len(each) - len(set(each)) for each in found.values())
