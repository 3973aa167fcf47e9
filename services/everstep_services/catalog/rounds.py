"""What rendezvous says of a job's round: who is here, and how many losses are to be survived."""

from collections.abc import Sequence

from everstep.bus.errors import BusError
from everstep.bus.ports import Bus
from everstep.messages import RoundDocument, Seat, ShowRound

_WITHIN_S = 1.5
_REMEMBERED = 1000


class Rounds:
    """Asked when it matters; without an answer nothing is repaired, and nobody is named."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._wanted: dict[str, tuple[int, int]] = {}

    async def seats(self, job: str) -> Sequence[Seat]:
        """Who takes part; nobody while rendezvous does not answer."""
        found = await self._show(job)
        return () if found is None else found.seats

    async def wanted_losses(self, job: str, round_: int) -> int | None:
        """How many nodes may be lost at once, as copies are laid out; None if nobody says."""
        known = self._wanted.get(job)
        if known is not None and known[0] == round_:
            return known[1]
        found = await self._show(job)
        if found is None or found.round != round_:
            return None
        how = found.replication
        wanted = 0 if how is None else max(how.factor - how.parts_needed, 0)
        while len(self._wanted) >= _REMEMBERED:
            self._wanted.pop(next(iter(self._wanted)))
        self._wanted[job] = (round_, wanted)
        return wanted

    async def _show(self, job: str) -> RoundDocument | None:
        try:
            return await self._bus.ask(
                "rendezvous",
                "show",
                ShowRound(job=job),
                RoundDocument,
                job=job,
                within_s=_WITHIN_S,
            )
        except BusError:
            return None
