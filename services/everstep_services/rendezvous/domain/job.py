"""One job, from its document: events go in, a new document and orders come out."""

from collections.abc import Iterable, Mapping, Sequence

from everstep.messages import (
    Done,
    Fact,
    Join,
    Leave,
    Message,
    NodeLost,
    Report,
    RoundDocument,
    StallLocated,
)
from everstep.messages.documents.rounds import PlannedEnd
from everstep_services.rendezvous.domain import (
    agreed_save,
    checks,
    incidents,
    liveness,
    lost_document,
    membership,
    preemption,
    replacement_groups,
    reports,
    requests,
    stalls,
)
from everstep_services.rendezvous.domain.admission import Refusal
from everstep_services.rendezvous.domain.batch import Batch, ReplicaMemory
from everstep_services.rendezvous.domain.ends import close_allocations, end_round
from everstep_services.rendezvous.domain.events import (
    BatchOutcome,
    Event,
    JobControl,
    Now,
    Probed,
    Tick,
)
from everstep_services.rendezvous.domain.formation import candidate_of, try_form, world_of
from everstep_services.rendezvous.domain.incidents import Sign
from everstep_services.rendezvous.domain.network import findings
from everstep_services.rendezvous.domain.placement import largest_size
from everstep_services.rendezvous.domain.state import OVER, JobState
from everstep_services.rendezvous.domain.timers import Timers
from everstep_services.rendezvous.settings import RendezvousSettings

_Settled = Refusal | Done | bool | None


class RendezvousJob:
    """One replica's knowledge of a job.

    The decisions of a batch may be carried out only once the document that records them is
    written. If another replica wrote first, make another `RendezvousJob` from its document, with
    the same memory, and apply the same events again.
    """

    def __init__(
        self,
        document: RoundDocument,
        memory: ReplicaMemory,
        settings: RendezvousSettings,
        version: str = "",
    ) -> None:
        self._state = JobState(document)
        self._memory = memory
        self._settings = settings
        self._version = version

    @staticmethod
    def document_for(ask: Join, now: Now) -> RoundDocument:
        """Return the document of a job whose first agent is joining."""
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
        """The document to write."""
        return self._state.document()

    @property
    def outbox(self) -> Mapping[str, Fact | None]:
        """Facts, by their text, that are decided but perhaps not recorded yet; see `JobState`."""
        return self._state.outbox.copy()

    def recorded(self, facts: Iterable[str]) -> None:
        """Remove these facts from the next document, because they are recorded."""
        for text in facts:
            self._state.outbox.pop(text, None)

    def apply(self, events: Sequence[Event], now: Now, control: JobControl) -> BatchOutcome:
        """Decide about a batch of events together."""
        timers = Timers(self._memory.started, now.s)
        batch = Batch(
            self._state, self._memory, timers, now, self._settings, control, self._version
        )
        self._state.is_changed = False
        _stamp(batch)
        results = [_one(batch, event) for event in events]
        _settle(batch)
        replies = [
            _reply(batch, event, result) for event, result in zip(events, results, strict=True)
        ]
        wake_at = min(batch.wakes, default=None)
        return BatchOutcome(replies, batch.sends, batch.probes, wake_at, self._state.is_changed)


def _stamp(batch: Batch) -> None:
    """Start the timers of conditions that this replica sees for the first time."""
    doc = batch.state.doc
    batch.timers.start("awake")
    batch.timers.start("phase", doc.round, doc.phase)
    if doc.phase in {"forming", "running"}:
        batch.timers.start("lived", doc.round)
    if doc.has_stepped:
        batch.timers.start("stepping", doc.round)
    for number in doc.recent:
        batch.timers.start("restart", doc.job, number)


def _one(batch: Batch, event: Event) -> _Settled:
    match event:
        case Join():
            batch.memory.heard[event.instance] = batch.now.s
            batch.memory.unsaved[event.instance] = event.unsaved
            if not batch.state.doc.allocations and not batch.state.doc.round:
                _begin(batch, event)
            return membership.join(batch, event)
        case Leave():
            return membership.leave(batch, event)
        case Report():
            batch.memory.heard[event.instance] = batch.now.s
            return reports.hear(batch, event)
        case Probed() | NodeLost() | StallLocated():
            _seen(batch, event)
        case Tick():
            pass
        case _:
            return requests.request(batch, event)
    return None


def _seen(batch: Batch, event: Probed | NodeLost | StallLocated) -> None:
    match event:
        case Probed():
            liveness.probed(batch, event)
        case NodeLost():
            liveness.lost(batch, event)
        case StallLocated():
            stalls.located(batch, event)


def _begin(batch: Batch, event: Join) -> None:
    if not batch.state.present and not batch.state.doc.refused:
        membership.begin(batch, event)


def _reply(batch: Batch, event: Event, result: _Settled) -> Message | None:
    if isinstance(event, Join) and not isinstance(result, Done | bool):
        return membership.answer(batch, event, result)
    if isinstance(event, Report) and isinstance(result, bool):
        return reports.answer(batch, event, is_current=result)
    return result if isinstance(result, Done) else None


def _settle(batch: Batch) -> None:
    """Apply all rules that follow from the state alone, not from an event."""
    reports.settle(batch)
    lost_document.settle(batch)
    stalls.settle(batch)
    checks.settle(batch)
    agreed_save.agree(batch)
    replacement_groups.settle(batch)
    preemption.settle(batch)
    agreed_save.settle(batch)
    is_testing = findings.settle(batch)
    requests.dismiss(batch)
    if batch.state.doc.phase in {"joining", "ending"}:
        if not is_testing:
            try_form(batch)
    elif batch.state.doc.phase == "running":
        _grow(batch)
    incidents.extend(batch)
    liveness.look_for_signs(batch)
    doc = batch.state.doc
    if doc.phase in OVER and doc.allocations and not batch.state.present:
        close_allocations(batch, "lost", "its agents fell silent", None)


def _grow(batch: Batch) -> None:
    """End a round that could be larger, if the settings allow it, once its ranks have saved."""
    doc, after_s = batch.state.doc, batch.settings.grow_after_s
    if after_s is None or doc.slots >= doc.spec.nodes_max or not doc.has_stepped:
        return
    if doc.planned is not None or agreed_save.overruled(batch):
        return
    if not batch.control.enforces("restart", otherwise=True):  # all ranks of this round live
        return
    stay = [candidate_of(seat) for seat in batch.state.seats if seat.stage != "gone"]
    size = largest_size(stay, world_of(batch))
    if size <= doc.slots:
        batch.timers.clear("could_grow", doc.round)
        return
    batch.timers.start("could_grow", doc.round)
    left_s = after_s - batch.timers.elapsed("could_grow", doc.round)
    if left_s > 0:
        batch.wake_in(left_s)
        return
    reason = f"{size} slots could be filled for {after_s:g} s, and only {doc.slots} run"
    if doc.survives:
        end_round(batch, Sign("grow", reason), keeps=True)
        return
    agreed_save.end_after_save(
        batch, PlannedEnd(cause="grow", reason=reason, within_s=batch.settings.save_within_s)
    )
