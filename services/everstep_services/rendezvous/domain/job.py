"""One job, from its document: events go in, a new document and orders come out."""

from collections.abc import Sequence

from everstep.messages import (
    Done,
    Join,
    Leave,
    Message,
    NodeLost,
    Report,
    RoundDocument,
)
from everstep_services.rendezvous.domain import (
    agreed_save,
    incidents,
    liveness,
    membership,
    preemption,
    recovery,
    reports,
    requests,
    stalls,
)
from everstep_services.rendezvous.domain.admission import Refusal
from everstep_services.rendezvous.domain.batch import Memory, Turn
from everstep_services.rendezvous.domain.ends import close_allocations, end_round
from everstep_services.rendezvous.domain.events import (
    Control,
    Event,
    Now,
    Outcome,
    Probed,
    Tick,
)
from everstep_services.rendezvous.domain.formation import candidate_of, try_form, world_of
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.placement import largest_size
from everstep_services.rendezvous.domain.state import OVER, State
from everstep_services.rendezvous.settings import RendezvousSettings

_Settled = Refusal | Done | bool | None


class Job:
    """All that one replica knows about a job.

    Nothing that it decides may be done before the document that says so is written down. If
    somebody else wrote first, make another `Job` from what they wrote, with the same memory, and
    apply the same events again.
    """

    def __init__(
        self,
        document: RoundDocument,
        memory: Memory,
        settings: RendezvousSettings,
        version: str = "",
    ) -> None:
        self._state = State(document)
        self._memory = memory
        self._settings = settings
        self._version = version

    @staticmethod
    def document_for(ask: Join, now: Now) -> RoundDocument:
        """What is known about a job whose first agent is asking."""
        return RoundDocument(
            job=ask.job,
            round=0,
            phase="joining",
            spec=ask.spec,
            allocation=ask.allocation,
            phase_since=now.wall,
            reason="the first agent has come",
        )

    @property
    def document(self) -> RoundDocument:
        """To be written down."""
        return self._state.document()

    @property
    def outbox(self) -> Sequence[str]:
        """Facts that are decided and may not be recorded yet."""
        return tuple(self._state.outbox)

    def recorded(self, facts: Sequence[str]) -> None:
        """These are safe: the next document need not hold them."""
        known = set(facts)
        self._state.outbox = [text for text in self._state.outbox if text not in known]

    def apply(self, events: Sequence[Event], now: Now, control: Control) -> Outcome:
        """Decide about a batch of events together."""
        turn = Turn(self._state, self._memory, now, self._settings, control, self._version)
        self._state.is_changed = False
        _stamp(turn)
        found = [_one(turn, event) for event in events]
        _settle(turn)
        replies = [_reply(turn, event, what) for event, what in zip(events, found, strict=True)]
        wake_at = min(turn.wakes, default=None)
        return Outcome(replies, turn.sends, turn.probes, wake_at, self._state.is_changed)


def _stamp(turn: Turn) -> None:
    """Start the clock of whatever this replica sees for the first time."""
    doc = turn.state.doc
    turn.since("awake")
    turn.since("phase", doc.round, doc.phase)
    if doc.phase in {"forming", "running"}:
        turn.since("lived", doc.round)
    if doc.has_stepped:
        turn.since("stepping", doc.round)
    for number in doc.recent:
        turn.since("restart", doc.job, number)


def _one(turn: Turn, event: Event) -> _Settled:
    match event:
        case Join():
            turn.memory.heard[event.instance] = turn.now.s
            if not turn.state.doc.allocations and not turn.state.doc.round:
                _begin(turn, event)
            return membership.join(turn, event)
        case Leave():
            return membership.leave(turn, event)
        case Report():
            turn.memory.heard[event.instance] = turn.now.s
            return reports.hear(turn, event)
        case Probed():
            liveness.probed(turn, event)
        case NodeLost():
            liveness.lost(turn, event)
        case Tick():
            pass
        case _:
            return requests.request(turn, event)
    return None


def _begin(turn: Turn, event: Join) -> None:
    if not turn.state.present and not turn.state.doc.refused:
        membership.begin(turn, event)


def _reply(turn: Turn, event: Event, found: _Settled) -> Message | None:
    if isinstance(event, Join) and not isinstance(found, Done | bool):
        return membership.answer(turn, event, found)
    if isinstance(event, Report) and isinstance(found, bool):
        return reports.answer(turn, is_current=found)
    return found if isinstance(found, Done) else None


def _settle(turn: Turn) -> None:
    """Everything that follows from the state alone, whatever brought it about."""
    reports.settle(turn)
    recovery.settle(turn)
    stalls.settle(turn)
    agreed_save.agree(turn)
    preemption.settle(turn)
    agreed_save.settle(turn)
    requests.dismiss(turn)
    if turn.state.doc.phase in {"joining", "ending"}:
        try_form(turn)
    elif turn.state.doc.phase == "running":
        _grow(turn)
    incidents.extend(turn)
    liveness.look_for_signs(turn)
    doc = turn.state.doc
    if doc.phase in OVER and doc.allocations and not turn.state.present:
        close_allocations(turn, "lost", "its agents fell silent", None)


def _grow(turn: Turn) -> None:
    """End a round that could be larger, where that is wanted."""
    doc, after_s = turn.state.doc, turn.settings.grow_after_s
    if after_s is None or doc.slots >= doc.spec.nodes_max or not doc.has_stepped:
        return
    stay = [candidate_of(seat) for seat in turn.state.seats if seat.stage != "gone"]
    size = largest_size(stay, world_of(turn))
    if size <= doc.slots:
        turn.memory.forget("could_grow", doc.round)
        return
    left_s = after_s - turn.since("could_grow", doc.round)
    if left_s > 0:
        turn.wake_in(left_s)
        return
    reason = f"{size} slots can be filled for {after_s:g} s, and {doc.slots} run"
    end_round(turn, "grow", Sign("grow", reason))
