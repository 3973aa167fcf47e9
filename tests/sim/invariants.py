"""What must hold in every schedule, checked at each write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.messages import (
    IncidentClosed,
    IncidentOpened,
    Join,
    Joined,
    Message,
    Report,
    Reported,
    RoundDocument,
    RoundEnded,
    RoundFormed,
    StartRanks,
    decode,
)
from everstep_services.rendezvous.domain.events import Event

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

WORKING = {"starting", "running", "finished"}


class Record:
    """What was written and done so far."""

    def __init__(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        self._round = 0
        self._round_before = 0
        self._revision_before = 0
        self._holders: dict[tuple[int, int], str] = {}
        self._refused: set[str] = set()
        self._gone: set[str] = set()
        self._decided: dict[str, str] = {}
        self._recorded: dict[str, str] = {}
        self._formed: dict[int, str] = {}
        self.is_over = False
        self.rounds = 0

    def took_slot(self, order: StartRanks, instance: str) -> None:
        """An agent starts ranks: nobody else may ever have had that slot in that round."""
        holder = self._holders.setdefault((order.round, order.slot), instance)
        assert holder == instance, (
            f"slot {order.slot} of round {order.round} is held by {holder} and {instance}"
        )

    def asks(self, question: Event) -> None:
        """A healthy agent asks, and may be let in at once."""
        self._round_before = self._round
        self._revision_before = self._fleet.revision
        if isinstance(question, Join) and not question.checks:
            self._refused.discard(question.instance)

    def asked(self, question: Event, reply: Message | None) -> None:
        """An agent was answered: refused ones have no slot until they are accepted."""
        # A replica that is not up to date may still say so; it must not have changed anything.
        counted = self._fleet.revision > self._revision_before
        is_current = isinstance(reply, Reported) and reply.is_current
        if isinstance(question, Report) and is_current and counted:
            holder = self._holders.get((question.round, question.slot))
            assert holder == question.instance, f"{question.instance} spoke for {holder}"
            assert question.round == self._round_before, "a report of an old round counted"
        if isinstance(question, Join) and isinstance(reply, Joined) and question.checks:
            assert self.is_over or not reply.is_accepted, "an unhealthy agent was let in"
        refusing = {"unhealthy", "excluded", "misconfigured"}
        if isinstance(question, Join) and isinstance(reply, Joined) and reply.cause in refusing:
            self._refused.add(question.instance)

    def written(self, document: RoundDocument) -> None:
        """A revision won: everything that must hold at every moment."""
        self.is_over = document.phase in {"done", "stopped"}
        for text in document.outbox:
            self._keep(self._decided, text)
        slots = [seat.slot for seat in document.seats if seat.slot is not None]
        assert len(slots) == len(set(slots)), f"two holders of a slot: {document.seats}"
        assert document.round >= self._round, "a round number was used again"
        if document.phase in {"forming", "running"}:
            self._runs(document)
        spec = document.spec
        if spec.max_restarts is not None:
            assert document.restarts - document.refilled <= spec.max_restarts, "budget exceeded"
        if spec.max_restarts_per_hour is not None:
            assert document.restarts <= spec.max_restarts_per_hour, "hourly budget exceeded"
        if document.round > self._round:
            self._forms(document)
        self._round = document.round

    def _runs(self, document: RoundDocument) -> None:
        members = {seat.slot for seat in document.seats if seat.stage in WORKING}
        assert members == set(range(document.slots)), f"not a whole world: {document.seats}"
        spec = document.spec
        assert spec.nodes_min <= document.slots <= spec.nodes_max, "not a world of the job's size"

    def _forms(self, document: RoundDocument) -> None:
        self.rounds += 1
        now = self._fleet.moment().wall
        for seat in document.seats:
            if seat.slot is None:
                continue
            assert seat.instance not in self._refused, f"{seat.node} was refused, and has a slot"
            assert not seat.is_leaving, f"{seat.node} is to leave, and has a slot"
            found = self._fleet.control.exclusion(seat.node, now)
            assert found is None, f"{seat.node} is excluded, and has a slot"
        segment = document.spec.slots_per_segment
        if segment > 1:
            by_slot = {seat.slot: seat.place for seat in document.seats if seat.slot is not None}
            for first in range(0, document.slots, segment):
                places = {by_slot[slot] for slot in range(first, first + segment)}
                assert len(places) == 1, f"a segment spans {places}"

    def recorded(self, facts: Sequence[str]) -> None:
        for text in facts:
            self._keep(self._recorded, text)

    def _keep(self, where: dict[str, str], text: str) -> None:
        start = text.index('"id":"') + 6
        known = where.setdefault(text[start : start + 32], text)
        assert known == text, f"one id, two facts: {known} and {text}"

    def check_end(self, document: RoundDocument) -> None:
        """Everything decided is recorded, once; the job came to an end that it deserves."""
        left = set(document.outbox)
        lost = [text for key, text in self._decided.items() if key not in self._recorded]
        assert all(text in left for text in lost), f"facts were lost: {lost}"
        assert document.phase in {"done", "stopped"}, (
            f"no progress: {document.phase} since {document.phase_since}: {document.reason}; "
            f"{[(s.node, s.slot, s.stage) for s in document.seats]}"
        )
        if document.exit_code not in {1, 90, 93}:
            assert document.phase == "done", f"{document.exit_code}: {document.reason}"
        self._check_facts()

    def _check_facts(self) -> None:
        opened: dict[str, IncidentOpened] = {}
        rounds: set[int] = set()
        for text in self._decided.values():
            fact = decode(text.encode())
            if isinstance(fact, IncidentOpened):
                assert fact.incident not in opened, "an incident was opened twice"
                opened[fact.incident] = fact
            elif isinstance(fact, RoundFormed):
                assert fact.round not in rounds, f"round {fact.round} formed twice"
                rounds.add(fact.round)
            elif isinstance(fact, RoundEnded):
                assert fact.round in rounds, f"round {fact.round} ended and never formed"
        closed: set[str] = set()
        for text in self._decided.values():
            fact = decode(text.encode())
            if isinstance(fact, IncidentClosed):
                assert fact.incident not in closed, "an incident was closed twice"
                closed.add(fact.incident)
                wall_s = (fact.at - opened[fact.incident].at).total_seconds()
                wall_s += fact.ledger.detect_s
                assert abs(fact.ledger.wall_s - wall_s) < 0.001, f"{fact.ledger} is not {wall_s}"
