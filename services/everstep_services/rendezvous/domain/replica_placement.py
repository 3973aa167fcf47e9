"""Which nodes an agent sends its slot's state to, and which ones may still have it."""

from collections.abc import Iterable, Mapping, Sequence

from everstep.messages import Peer, Replication, Seat
from everstep_services.rendezvous.domain.peers import Neighbours, Place, cliques
from everstep_services.rendezvous.settings import RendezvousSettings

_NONE = -1


class Keepers:
    """Of one round, as its document says."""

    def __init__(self, replication: Replication, seats: Iterable[Seat]) -> None:
        self.key = replication.key
        self.parts_needed = replication.parts_needed
        self._factor = replication.factor
        self._now = self._before = Neighbours(_by_slot(replication.cliques))
        if replication.before:
            self._before = Neighbours(_by_slot(replication.before))
        self._holders: dict[int, Seat] = {}
        self._former: dict[int, list[Seat]] = {}
        for seat in seats:
            if seat.slot is not None:
                self._holders[seat.slot] = seat
            elif seat.last_slot is not None:
                self._former.setdefault(seat.last_slot, []).append(seat)

    def peers(self, slot: int) -> tuple[Peer, ...]:
        """Who is to keep a slot's state, the first part first."""
        return self._reached(self._now.after(slot)[: max(self._factor - 1, 0)])

    def sources(self, slot: int) -> tuple[Peer, ...]:
        """Who may have a slot's state from the rounds before: its holder then, and its keepers."""
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
    """Who keeps whose state in the round that begins. `key` is for a job that has none yet."""
    key = last.key if last is not None and last.key else key
    places = [
        Place(seat.slot, seat.failure_domain)
        for seat in members
        if seat.slot is not None and seat.replica_port is not None
    ]
    factor, parts_needed = settings.replica_factor, settings.replica_parts_needed
    if len(places) < factor and parts_needed > 1:
        factor, parts_needed = 2, 1  # too few nodes for as many parts
    factor = min(factor, len(places))
    before = () if last is None else last.cliques
    found = cliques(places, factor, settings.replica_jump, _by_slot(before))
    if not found:
        return Replication(key=key)
    numbers = tuple(found.get(slot, _NONE) for slot in range(len(members)))
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
