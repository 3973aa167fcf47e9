"""Which nodes an agent sends its slot's state to, and which nodes may still have it."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from everstep.messages import Peer, Replication, Seat
from everstep_services.rendezvous.settings import RendezvousSettings

_NONE = -1


@dataclass(frozen=True, slots=True)
class ReplicaSlot:
    """A slot whose node can hold states."""

    slot: int
    domain: str = ""
    """The failure domain of its node; empty if the node fails alone."""


def cliques(
    places: Sequence[ReplicaSlot], factor: int, jump: int | None, before: Mapping[int, int]
) -> dict[int, int]:
    """Return the number of each slot's clique: at least `factor` slots, of different domains.

    Cliques stay as they were, unless new ones separate domains better: each state that moves must
    be sent again. With a `jump`, slots at that distance form a clique, as in NVRx.
    """
    factor = min(factor, len(places))
    if factor < 2:
        return {}
    if jump is not None:
        slots = sorted(place.slot for place in places)
        return _by_jump(slots, factor, min(jump, len(slots) // factor))
    ordered = sorted(places, key=lambda place: (place.domain, place.slot))
    # Neighbours in that order probably share a domain; slots that are far apart do not.
    fresh = _by_jump([place.slot for place in ordered], factor, len(places) // factor)
    domains = {place.slot: place.domain for place in places}
    if _fits(before, fresh, factor) and _mixed(before, domains) <= _mixed(fresh, domains):
        return dict(before)
    return fresh


class Cliques:
    """The members of each clique."""

    def __init__(self, of: Mapping[int, int]) -> None:
        self._of = of
        self._in: dict[int, list[int]] = defaultdict(list)
        for slot in sorted(of):
            self._in[of[slot]].append(slot)

    def after(self, slot: int) -> tuple[int, ...]:
        """Return the others of a slot's clique in turn: the first ones keep its state."""
        if slot not in self._of:
            return ()
        members = self._in[self._of[slot]]
        at = members.index(slot)
        return (*members[at + 1 :], *members[:at])


def _by_jump(slots: Sequence[int], factor: int, jump: int) -> dict[int, int]:
    """Make cliques of slots `jump` apart, in blocks of `jump * factor`; the rest joins the last."""
    blocks = max(len(slots) // (jump * factor), 1)
    return {
        slot: min(at // (jump * factor), blocks - 1) * jump + at % jump
        for at, slot in enumerate(slots)
    }


def _fits(before: Mapping[int, int], fresh: Mapping[int, int], factor: int) -> bool:
    sizes = Counter(before.values())
    return before.keys() == fresh.keys() and min(sizes.values()) >= factor


def _mixed(of: Mapping[int, int], domains: Mapping[int, str]) -> int:
    """Return how many slots share their clique with another slot of their domain."""
    names: dict[int, list[str]] = defaultdict(list)
    for slot, clique in of.items():
        if domains[slot]:
            names[clique].append(domains[slot])
    return sum(len(each) - len(set(each)) for each in names.values())


class ReplicaHolders:
    """The holders of states in one round, according to its document."""

    def __init__(self, replication: Replication, seats: Iterable[Seat]) -> None:
        self.key = replication.key
        self.parts_needed = replication.parts_needed
        self._factor = replication.factor
        self._now = self._before = Cliques(_by_slot(replication.cliques))
        if replication.before:
            self._before = Cliques(_by_slot(replication.before))
        self._holders: dict[int, Seat] = {}
        self._former: dict[int, list[Seat]] = {}
        for seat in seats:
            if seat.slot is not None:
                self._holders[seat.slot] = seat
            elif seat.last_slot is not None:
                self._former.setdefault(seat.last_slot, []).append(seat)

    def peers(self, slot: int) -> tuple[Peer, ...]:
        """Return the nodes that must keep a slot's state, the first part first."""
        return self._reached(self._now.after(slot)[: max(self._factor - 1, 0)])

    def sources(self, slot: int) -> tuple[Peer, ...]:
        """Return the nodes that may have a slot's state from earlier rounds: holder and keepers."""
        if not self._holders and not self._former:
            return ()
        former = [_peer(seat) for seat in self._former.get(slot, ())]
        kept = dict.fromkeys((*self._before.after(slot), *self._now.after(slot)))
        return (*(peer for peer in former if peer is not None), *self._reached(tuple(kept)))

    def _reached(self, slots: Sequence[int]) -> tuple[Peer, ...]:
        seats = (self._holders[slot] for slot in slots if slot in self._holders)
        return tuple(peer for peer in map(_peer, seats) if peer is not None)


def arranged(
    members: Sequence[Seat],
    last: Replication | None,
    settings: RendezvousSettings,
    key: str,
) -> Replication:
    """Return which nodes keep which states in the new round; `key` is for a job without a key."""
    key = last.key if last is not None and last.key else key
    places = [
        ReplicaSlot(seat.slot, seat.failure_domain)
        for seat in members
        if seat.slot is not None and seat.replica_port is not None
    ]
    factor, parts_needed = settings.replica_factor, settings.replica_parts_needed
    if len(places) < factor and parts_needed > 1:
        factor, parts_needed = 2, 1  # too few nodes for as many parts
    factor = min(factor, len(places))
    before = () if last is None else last.cliques
    numbering = cliques(places, factor, settings.replica_jump, _by_slot(before))
    if not numbering:
        return Replication(key=key)
    numbers = tuple(numbering.get(slot, _NONE) for slot in range(len(members)))
    is_new = before and len(before) == len(numbers) and before != numbers
    return Replication(
        key=key,
        factor=factor,
        parts_needed=parts_needed,
        cliques=numbers,
        before=before if is_new else (),
    )


def _by_slot(numbers: Sequence[int]) -> Mapping[int, int]:
    return {slot: number for slot, number in enumerate(numbers) if number != _NONE}


def _peer(seat: Seat) -> Peer | None:
    if seat.replica_port is None or seat.stage == "gone":
        return None
    return Peer(node=seat.node, slot=seat.slot or 0, address=seat.address, port=seat.replica_port)
