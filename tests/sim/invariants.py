"""What must hold in every schedule, checked at each write."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.messages import (
    ActionDecided,
    IncidentClosed,
    IncidentOpened,
    Join,
    Joined,
    Message,
    Order,
    Report,
    Reported,
    RoundDocument,
    RoundEnded,
    RoundFormed,
    SaveCheckpoint,
    StartRanks,
    StopRanks,
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
        self._started: set[tuple[int, str]] = set()
        self._told_to_stop: set[tuple[int, str]] = set()
        self._refused: set[str] = set()
        self._gone: set[str] = set()
        self._decided: dict[str, str] = {}
        self._recorded: dict[str, str] = {}
        self._lost: set[str] = set()
        self._known = 0
        self._formed: set[int] | None = None
        self._excused: dict[tuple[int, int | None], float] = {}
        self._saves: dict[str, int | None] = {}
        self._stopped: set[int] = set()
        self._last_round: int | None = None
        """The round in which a person has stopped the job."""
        self.is_over = False
        self.rounds = 0
        self.excuses = 0
        self.agreed = 0
        self.distrusted = 0
        self.measured = 0
        self.sent_away = 0
        self.moved = 0
        self.held = 0
        self._nodes: dict[int, str] = {}
        """The holders of the slots of the newest round."""

    def forgotten(self, document: RoundDocument | None) -> None:
        """The document is lost, with the facts in it: rounds go on that none tells of."""
        self._lost = self._decided.keys() - self._recorded.keys()
        self._round, self._known, self._formed = 0, 0, set()
        self._last_round = None
        self.is_over = False

    def heard(self, order: Order, instance: str) -> None:
        """An agent has an order: it never starts ranks of a round that it was told to stop."""
        if isinstance(order, StopRanks):
            self._told_to_stop.add((order.round, instance))

    def took_slot(self, order: StartRanks, instance: str) -> None:
        """An agent starts ranks, once: nobody else may ever have had that slot in that round."""
        start = (order.round, instance)
        assert start not in self._started, f"{instance} starts round {order.round} again"
        assert start not in self._told_to_stop, f"{instance} starts the stopped round {order.round}"
        self._started.add(start)
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
        # A replica that is not up to date may still answer; it must not have changed anything.
        counted = self._fleet.revision > self._revision_before
        is_current = isinstance(reply, Reported) and reply.is_current
        if isinstance(question, Report) and is_current and counted:
            holder = self._holders.get((question.round, question.slot))
            assert holder == question.instance, f"{question.instance} spoke for {holder}"
            assert question.round == self._round_before, "a report of an old round counted"
            self._reported(question)
        if isinstance(question, Report) and isinstance(reply, Reported) and not is_current:
            assert not self._is_holder(question), f"a report of a member was lost: {question}"
        if isinstance(question, Join) and isinstance(reply, Joined) and question.checks:
            is_in = reply.is_accepted and not self._leaves(question, reply)
            assert self.is_over or not is_in, "an unhealthy agent was let in"
        refusing = {"unhealthy", "excluded", "misconfigured"}
        if isinstance(question, Join) and isinstance(reply, Joined) and reply.cause in refusing:
            self._refused.add(question.instance)
        if isinstance(question, Join) and counted:
            self._known = max(self._known, question.known_round)

    def _is_holder(self, report: Report) -> bool:
        document = self._fleet.document
        if document is None or document.round != report.round:
            return False
        return any(
            (seat.instance, seat.slot) == (report.instance, report.slot)
            and seat.stage in {"starting", "running"}
            for seat in document.seats
        )

    def _leaves(self, question: Join, reply: Joined) -> bool:
        """Whether the agent must leave: accepted until its ranks are gone, and for no other round.

        Rendezvous answers it with the order to stop, or with its exit code.
        """
        if reply.slot is None and reply.exit_code is not None:
            return True
        if isinstance(reply.order, StartRanks) and reply.order.round != question.running_round:
            return False
        document = self._fleet.document
        seats = document.seats if document is not None else ()
        return any(seat.instance == question.instance and seat.is_leaving for seat in seats)

    def saves(self, order: SaveCheckpoint) -> None:
        """An agent has the step after which to save: all agents have the same step."""
        agreed = self._saves.setdefault(order.id, order.after_step)
        assert agreed == order.after_step, f"told to save after {agreed} and {order.after_step}"
        self.agreed += 1

    def _reported(self, report: Report) -> None:
        if report.event == "excused" and report.excuse_s is not None:
            until = self._fleet.now + min(report.excuse_s - report.age_s, 5.0)
            self._excused[report.round, report.rank] = until
            self.excuses += 1
        elif report.event == "rank_recovered":
            self._excused.pop((report.round, report.rank), None)
        elif report.event == "stopped":
            self._stopped.add(report.round)

    def _ended(self, fact: RoundEnded) -> None:
        if fact.cause == "rank_stalled":
            until = self._excused.get((fact.round, fact.rank), 0.0)
            assert self._fleet.now >= until, f"round {fact.round} ended by a stall with an excuse"
        if fact.cause == "done":
            assert fact.round not in self._stopped, f"round {fact.round} was only told to stop"

    def written(self, document: RoundDocument) -> None:
        """A revision won: everything that must hold at every moment."""
        self.is_over = document.phase in {"done", "stopped"}
        for text in document.outbox:
            if self._keep(self._decided, text) and '"round_ended.' in text:
                fact = decode(text.encode())
                assert isinstance(fact, RoundEnded)
                self._ended(fact)
        self._moves(document)
        self._stops(document)
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
        has_formed = self._formed is None or document.phase == "forming"  # else it only goes on
        if document.round > self._round and has_formed:
            self._forms(document)
        self._round = document.round

    def _stops(self, document: RoundDocument) -> None:
        """A stop that was accepted holds, whatever happens while the ranks may save."""
        if document.planned is not None and document.planned.exit_code is not None:
            self._last_round = document.round
        if self._last_round is None:
            return
        has_formed = document.phase == "forming" and document.round > self._last_round
        assert not has_formed, f"round {document.round} formed after the job was stopped"
        if document.phase == "stopped":
            assert document.exit_code == 93, f"stopped, and {document.exit_code}"
            self.held += 1
            self._last_round = None

    def _moves(self, document: RoundDocument) -> None:
        """Ranks that ask for it move to other nodes; that costs no restart but if nothing came."""
        nodes = {seat.slot: seat.node for seat in document.seats if seat.slot is not None}
        incident = document.incident
        if incident is not None and incident.asks == "move":
            if incident.is_decided and not document.is_moved:
                raise AssertionError("a move was decided, and is not remembered")
            if document.round > self._round and document.phase == "forming":
                self.moved += 1
                alone = len(nodes) == 1 and self._nodes == nodes
                stays = [node for slot, node in nodes.items() if self._nodes.get(slot) == node]
                assert not stays or alone, f"{stays} have the ranks that asked to move"
        if nodes:
            self._nodes = nodes

    def _runs(self, document: RoundDocument) -> None:
        members = {seat.slot for seat in document.seats if seat.stage in WORKING}
        whole = set(range(document.slots))
        if self._formed is not None and document.round not in self._formed:
            whole &= members  # the others have not come back with their slots yet
        assert members == whole, f"not a whole world: {document.seats}"
        spec = document.spec
        assert spec.nodes_min <= document.slots <= spec.nodes_max, "not a world of the job's size"

    def _forms(self, document: RoundDocument) -> None:
        self.rounds += 1
        if self._formed is not None:
            self._forms_again(document)
        now = self._fleet.moment().wall
        for seat in document.seats:
            if seat.slot is None:
                continue
            assert seat.instance not in self._refused, f"{seat.node} was refused, and has a slot"
            assert not seat.is_leaving, f"{seat.node} is to leave, and has a slot"
            found = self._fleet.control.exclusion(seat.node, now)
            assert found is None, f"{seat.node} is excluded, and has a slot"
        segment = self._fleet.segment
        self._spares_trusted(document)
        if segment > 1:
            by_slot = {seat.slot: seat.place for seat in document.seats if seat.slot is not None}
            for first in range(0, document.slots, segment):
                places = {by_slot[slot] for slot in range(first, first + segment)}
                assert len(places) == 1, f"a segment spans {places}"

    def _spares_trusted(self, document: RoundDocument) -> None:
        """No suspect has a slot that a spare which nothing speaks against could have."""
        control, now = self._fleet.control, self._fleet.moment().wall
        free = [
            seat
            for seat in document.seats
            if seat.stage == "idle" and not seat.is_leaving and seat.node not in control.suspects
            if control.exclusion(seat.node, now) is None
        ]
        for seat in document.seats:
            if seat.slot is None or seat.node not in control.suspects:
                continue
            self.distrusted += 1
            for spare in free:
                could = self._fleet.segment == 1 or spare.place == seat.place
                assert not could, f"{seat.node} is suspect, has a slot, and {spare.node} has none"

    def _forms_again(self, document: RoundDocument) -> None:
        """After the loss: the number is new, as far as anybody said who was heard."""
        assert self._formed is not None
        self._formed.add(document.round)
        assert document.round > self._known, f"round {document.round} was known, and formed again"
        # Nobody who was heard knew of an earlier round with this number.
        self._stopped.discard(document.round)
        for held in [held for held in self._holders if held[0] == document.round]:
            del self._holders[held]

    def recorded(self, facts: Sequence[str]) -> None:
        for text in facts:
            self._keep(self._recorded, text)

    def _keep(self, where: dict[str, str], text: str) -> bool:
        """Whether it is new."""
        start = text.index('"id":"') + 6
        key = text[start : start + 32]
        is_new = key not in where
        known = where.setdefault(key, text)
        assert known == text, f"one id, two facts: {known} and {text}"
        return is_new

    def check_end(self, document: RoundDocument) -> None:
        """Everything decided is recorded, once; the job ended as it deserves."""
        left = set(document.outbox)
        safe = self._recorded.keys() | self._lost
        lost = [text for key, text in self._decided.items() if key not in safe]
        assert all(text in left for text in lost), f"facts were lost: {lost}"
        assert document.phase in {"done", "stopped"}, (
            f"no progress: {document.phase} since {document.phase_since}: {document.reason}; "
            f"{[(s.node, s.slot, s.stage) for s in document.seats]}"
        )
        if document.exit_code not in {1, 90, 91, 93}:
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
            elif isinstance(fact, ActionDecided) and fact.rule == "network.slow":
                assert fact.nodes_out == (self._fleet.slow_node,), fact
                self.sent_away += 1
            elif isinstance(fact, RoundFormed):
                is_new = fact.round not in rounds or self._formed is not None
                assert is_new, f"round {fact.round} formed twice"
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
                wall_s += fact.ledger.unfinished_s + fact.ledger.detect_s
                assert abs(fact.ledger.wall_s - wall_s) < 0.001, f"{fact.ledger} is not {wall_s}"
