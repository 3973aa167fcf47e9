"""A replica of rendezvous over a simulated bus."""

from typing import TYPE_CHECKING

import msgspec

from everstep.messages import Join, Message, RoundDocument
from everstep_services.rendezvous.domain.batch import ReplicaMemory
from everstep_services.rendezvous.domain.events import BatchOutcome, Event, Tick
from everstep_services.rendezvous.domain.job import RendezvousJob
from everstep_services.rendezvous.job_runner import may_be_outdated
from everstep_services.rendezvous.settings import RendezvousSettings

if TYPE_CHECKING:
    from tests.sim.fleet import Fleet

DECODER = msgspec.json.Decoder(RoundDocument)
SETTINGS = RendezvousSettings(
    join_within_s=2000.0,
    last_call_s=0.5,
    elastic_wait_s=3.0,
    backoff_s=(0.0, 2.0, 5.0),
    quick_s=5.0,
)


class Replica:
    """One rendezvous: its memory, what it believes the document to be, and its timer."""

    def __init__(self, fleet: "Fleet") -> None:
        self.fleet = fleet
        self.memory = ReplicaMemory()
        self.job: RendezvousJob | None = None
        self.revision: int | None = None
        self.epoch = 0

    def decide(self, events: list[Event]) -> list[Message | None]:
        """Apply, write if nobody else wrote first, carry out. A crash may come in between."""
        fleet = self.fleet
        while True:
            if self.revision is None or (self.job is None and fleet.revision):
                self.load()
            if self.job is None:
                first = next((event for event in events if isinstance(event, Join)), None)
                if first is None:
                    return [None] * len(events)
                self.job = self.made(RendezvousJob.document_for(first, fleet.moment()))
            started = self.memory.started.copy()
            outcome = self.job.apply(events, fleet.moment(), fleet.control)
            if outcome.is_changed and fleet.write(self, self.job.document):
                break
            if not outcome.is_changed and (
                self.revision == fleet.revision or not may_be_outdated(events, outcome)
            ):
                break
            fleet.conflicts += 1
            self.memory.started = started
            self.load()
        if outcome.is_changed and fleet.rng.random() < fleet.crash_rate:
            self.restart()
            return [None] * len(events)
        self.carry_out(self.job, outcome)
        return outcome.replies

    def carry_out(self, job: RendezvousJob, outcome: BatchOutcome) -> None:
        fleet = self.fleet
        for send in outcome.sends:
            fleet.order(send.instance, send.order)
        for probe in outcome.probes:
            fleet.probe(self, probe)
        if outcome.is_changed:
            fleet.record.recorded(list(job.outbox))
            job.recorded(job.outbox)
        self.sleep(outcome.wake_at)

    def load(self) -> None:
        self.revision, self.job = self.fleet.revision, None
        if self.fleet.stored:
            self.job = self.made(DECODER.decode(self.fleet.stored))

    def made(self, document: RoundDocument) -> RendezvousJob:
        return RendezvousJob(document, self.memory, SETTINGS, "0.1.0")

    def sleep(self, wake_at: float | None) -> None:
        self.epoch += 1
        if wake_at is not None:
            epoch = self.epoch
            self.fleet.at(max(wake_at, self.fleet.now + 0.01), lambda: self.woken(epoch))

    def woken(self, epoch: int) -> None:
        if epoch == self.epoch:
            self.decide([Tick()])

    def news(self) -> None:
        """A newer document was announced."""
        if self.revision != self.fleet.revision:
            self.load()
            self.decide([Tick()])

    def restart(self) -> None:
        """It dies, and another one comes that remembers nothing."""
        self.memory, self.job, self.revision = ReplicaMemory(), None, None
        self.epoch += 1
        self.fleet.later(0.5, self.decide, [Tick()])
