"""One job at one replica: collects events, decides them together, writes, then carries out."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from everstep import __version__, spans, subjects
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.facts.codec import facts_in
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Document
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    Done,
    Join,
    Leave,
    Message,
    Report,
    Reported,
    RoundDocument,
    tag_of,
)
from everstep_services.rendezvous.domain.batch import ReplicaMemory
from everstep_services.rendezvous.domain.events import (
    BatchOutcome,
    Event,
    JobControl,
    LivenessProbe,
    Now,
    Probed,
    Tick,
)
from everstep_services.rendezvous.domain.job import RendezvousJob
from everstep_services.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

BUCKET = "ROUNDS"
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RoundDocument)
_TIDY_AFTER_S = 1.0
_RESCUE_AFTER_S = 3.0
_RETRY_S = 0.5
_CURRENT_FOR_S = 1.0
_ATTEMPTS = 50
_SENDS_AT_ONCE = 200
_GATHERED_BYTES = 256 * 1024
"""A document of this size, some 1 500 nodes, is written after `gather_s`; for a larger one more
events gather, in proportion, because each batch encodes and compresses all of it."""
Pending = list[tuple[Event, asyncio.Future[Message] | None]]
"""Events, each with the future of its answer."""


class UnreadableRoundError(EverstepError):
    """The document of a job cannot be decoded; nothing is decided about that job."""

    def __init__(self, job: str, why: str) -> None:
        super().__init__(
            f"the document about the rounds of job {job} cannot be read ({why}): a newer release "
            f"may have written it; otherwise look at key {job} of bucket {BUCKET}, and remove it"
        )
        self.job = job


@dataclass(slots=True)
class RunnerCounts:
    """Counters of a replica, over all jobs."""

    questions: int = 0
    batches: int = 0
    conflicts: int = 0
    orders: int = 0
    facts: int = 0
    probes: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaContext:
    """What all runners of a replica share."""

    settings: RendezvousSettings
    bus: Bus
    clock: Clock
    control: Callable[[str], JobControl]
    tasks: asyncio.TaskGroup
    counts: RunnerCounts = field(default_factory=RunnerCounts)


class JobRunner:
    """Decides about one job, in competition with other replicas: the first write wins."""

    def __init__(self, job: str, around: ReplicaContext) -> None:
        self._name = job
        self._around = around
        self._documents = around.bus.documents(BUCKET)
        self._events: Pending = []
        self._trace: str | None = None
        """The context of the newest question, which the orders of its batch carry on."""
        self._woken = asyncio.Event()
        self._memory = ReplicaMemory()
        self._returns = around.bus.returns
        self._job: RendezvousJob | None = None
        self._revision: int | None = None
        self._current_at = -inf
        """When this replica last read or wrote the newest document."""
        self._stored_outbox = False
        self._news: Document | None = None
        self._wake_at: float | None = None
        self._tidy_at: float | None = None
        self._size_bytes = 0
        self._recording: asyncio.Task[None] | None = None
        self._input_failures = InputFailures(f"job {job}")
        self._unreadable = ""
        """The last logged error of an unreadable document."""

    @property
    def failures(self) -> int:
        """The number of batches that failed with an unexpected error."""
        return self._input_failures.failures

    async def ask(self, question: Event) -> Message:
        """Return the answer, once the document behind it is written."""
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._around.counts.questions += 1
        self._events.append((question, answer))
        self._trace = spans.headers().get(spans.HEADER)
        self._woken.set()
        return await answer

    def tell(self, event: Event) -> None:
        """Add an event that nobody awaits an answer to."""
        self._events.append((event, None))
        self._woken.set()

    def offer(self, document: Document) -> None:
        """Note a revision of the job's document, written by us or by another replica."""
        if document.revision == self._revision:
            return  # this replica wrote it
        if self._news is None or document.revision > self._news.revision:
            self._news = document
            self.tell(Tick())

    def wake(self) -> None:
        """Decide about the job again without a new event."""
        self.tell(Tick())

    def _see_whether_it_was_away(self) -> None:
        """After the bus was away, read the document again and restart the timers."""
        returns = self._around.bus.returns
        if returns != self._returns:
            self._returns = returns
            self._memory = ReplicaMemory()
            self._revision = None

    async def show(self) -> RoundDocument:
        """Return the job's document."""
        stored = await self._documents.get(self._name)
        if stored.data is None:
            raise RefusalError("404", f"there is no job {self._name}")
        return _decoded(self._name, stored.data)

    async def work_for_ever(self) -> None:
        """Decide about incoming events, batch by batch."""
        while True:
            await self._wait()
            # Nothing is decided without the bus: an agent that cannot be heard has not failed.
            await self._around.bus.wait_connected()
            if self._events:
                share = max(1.0, self._size_bytes / _GATHERED_BYTES)
                await self._around.clock.sleep(self._around.settings.gather_s * share)
            self._see_whether_it_was_away()
            pending, self._events = self._events, []
            self._woken.clear()
            try:
                await self._decide([event for event, _ in pending] or [Tick()], pending)
            except BusError as error:
                self._put_off(pending, error)
            except UnreadableRoundError as error:
                self._leave_alone(pending, error)
            except Exception as error:  # noqa: BLE001  other jobs must not suffer from this one
                self._pass_over(pending, error)
            with self._input_failures.caught("facts that wait"):
                await self._tidy()

    async def _wait(self) -> None:
        times = [at for at in (self._wake_at, self._tidy_at) if at is not None]
        if not times:
            await self._woken.wait()
            return
        try:
            async with asyncio.timeout(max(min(times) - self._around.clock.now(), 0.0)):
                await self._woken.wait()
        except TimeoutError:
            return

    async def _decide(self, events: list[Event], pending: Pending) -> None:
        for _ in range(_ATTEMPTS):
            now = self._now()
            job = await self._load(events, now)
            if job is None:
                await self._around.bus.prove(0)  # else another replica may know the job
                _no_such_job(self._name, pending)
                self._revision = self._wake_at = None  # another replica may make the document
                return
            started = self._memory.started.copy()
            outcome, is_stored = job.apply(events, now, self._around.control(self._name)), False
            try:
                is_stored = await self._is_stored(job, events, outcome)
            finally:
                if not is_stored:
                    self._memory.started = started  # what the batch decided has not happened
            if not is_stored:
                continue
            self._around.counts.batches += 1
            self._wake_at = outcome.wake_at
            await self._carry_out(outcome, pending)
            if outcome.is_changed:
                self._tidy_at = self._around.clock.now() + _TIDY_AFTER_S
                self._recording = self._around.tasks.create_task(self._record_decided(job))
            return
        raise BusError(f"job {self._name}: other replicas wrote first {_ATTEMPTS} times in a row")

    async def _is_stored(
        self, job: RendezvousJob, events: list[Event], outcome: BatchOutcome
    ) -> bool:
        """Write what was decided; False if another replica has written since this one read."""
        if not outcome.is_changed:
            return not (self._may_be_outdated(events, outcome) and await self._is_outdated())
        try:
            await self._write(job)
        except ConflictError:
            self._around.counts.conflicts += 1
            self._revision = None
            return False
        return True

    async def _load(self, events: list[Event], now: Now) -> RendezvousJob | None:
        """Return the job as of the newest known revision."""
        news, self._news = self._news, None
        if self._revision is not None and news is not None and news.revision > self._revision:
            self._take(news)
        if self._revision is None:
            self._take(await self._documents.get(self._name))
        if self._job is None:
            first = next((event for event in events if isinstance(event, Join)), None)
            if first is None:
                return None
            document = RendezvousJob.document_for(first, now)
            self._job = self._made(document)
        return self._job

    def _take(self, document: Document) -> None:
        self._revision, self._job = document.revision, None
        self._stored_outbox = False
        if document.data is None:
            self._revision = 0
            return
        stored = _decoded(self._name, document.data)
        self._size_bytes = len(document.data)
        self._job = self._made(stored)
        if stored.outbox:
            # The replica that wrote the fact records it; if it remains here, that replica is gone.
            self._stored_outbox = True
            self._tidy_at = self._around.clock.now() + _RESCUE_AFTER_S

    def _made(self, document: RoundDocument) -> RendezvousJob:
        return RendezvousJob(document, self._memory, self._around.settings, __version__)

    async def _write(self, job: RendezvousJob) -> None:
        if self._recording is not None:
            await self._recording  # what is recorded by now need not be written again
        revision, self._revision = self._revision, None
        data = _ENCODER.encode(job.document)
        self._size_bytes = len(data)
        try:
            async with asyncio.timeout(self._around.settings.renew_within_s):
                self._revision = await self._documents.put(self._name, data, revision=revision)
        except TimeoutError as error:
            raise BusError(f"job {self._name}: its document was not written in time") from error
        self._current_at = self._around.clock.now()
        self._stored_outbox = bool(job.outbox)

    def _may_be_outdated(self, events: Sequence[Event], outcome: BatchOutcome) -> bool:
        """Whether agents ask what only a newer document may know.

        A replica that was cut off has heard no news, and an agent that waits may always ask it.
        """
        asks = any(isinstance(event, Join) for event in events)
        is_due = self._around.clock.now() - self._current_at >= _CURRENT_FOR_S
        return (asks and is_due) or may_be_outdated(events, outcome)

    async def _is_outdated(self) -> bool:
        """Whether another replica has written since; if so, forget what this replica knows.

        Only a replica that can write knows: an agent does not repeat a report that was answered.
        """
        await self._around.bus.prove(0)
        stored = await self._documents.get(self._name)
        self._current_at = self._around.clock.now()
        if stored.data is None or stored.revision <= (self._revision or 0):
            return False
        self._revision = None
        return True

    async def _carry_out(self, outcome: BatchOutcome, pending: Pending) -> None:
        around = self._around
        trace, self._trace = self._trace, None
        about = {"everstep.job": self._name}
        for number, send in enumerate(outcome.sends, 1):
            with spans.span(f"order {tag_of(send.order)}", "client", about, parent=trace):
                around.bus.send(self._subject(send.node, send.instance), send.order)
            if number % _SENDS_AT_ONCE == 0:  # more would push the oldest out of the bus's queue
                await asyncio.sleep(0)
        around.counts.orders += len(outcome.sends)
        for (_, answer), reply in zip(pending, outcome.replies, strict=False):
            if answer is not None and not answer.done() and reply is not None:
                answer.set_result(reply)
        for probe in outcome.probes:
            around.tasks.create_task(self._probe(probe), name=f"probe-{probe.node}")
        around.counts.probes += len(outcome.probes)

    def _subject(self, node: str | None, instance: str) -> str:
        """Return the subject of an order, for one of the agents that may have this node id."""
        return subjects.order(self._name, instance or node)

    async def _probe(self, probe: LivenessProbe) -> None:
        within_s = self._around.settings.probe_within_s
        try:
            subject = self._subject(probe.node, probe.instance)
            is_there = await self._around.bus.deliver(subject, probe.order, within_s=within_s)
        except (EverstepError, TimeoutError) as error:
            # An unreachable agent is not gone.
            log.debug("probe_untold job=%s node=%s error=%s", self._name, probe.node, error)
            return
        self.tell(Probed(probe.node, probe.instance, is_there))

    async def _record_decided(self, job: RendezvousJob) -> None:
        """Record facts while the next batch is gathered and decided."""
        with self._input_failures.caught("facts to record"):
            await self._record(job)

    async def _record(self, job: RendezvousJob) -> None:
        """Record the decided facts. A fact that fails stays in the document for another attempt."""
        waiting = job.outbox
        facts = facts_in(text for text, fact in waiting.items() if fact is None)
        facts += [fact for fact in waiting.values() if fact is not None]
        if not facts:
            return
        try:
            await self._around.bus.record(*facts)
        except BusError as error:
            log.warning("facts_not_recorded job=%s error=%s", self._name, error)
        else:
            self._around.counts.facts += len(facts)
            job.recorded(waiting)
        self._tidy_at = self._around.clock.now() + _TIDY_AFTER_S

    async def _tidy(self) -> None:
        """Remove recorded facts from the document, if no other write does."""
        if self._tidy_at is None or self._around.clock.now() < self._tidy_at:
            return
        self._tidy_at = None
        job = self._job
        if job is None or self._revision is None or not self._stored_outbox:
            return
        try:
            await self._record(job)
            self._tidy_at = None
            await self._write(job)
        except ConflictError:
            self._revision = None
            self.tell(Tick())
        except BusError as error:
            log.info("not_tidied job=%s error=%s", self._name, error)
            self._tidy_at = self._around.clock.now() + _TIDY_AFTER_S

    def _put_off(self, pending: Pending, error: BusError) -> None:
        """Drop events after a failure of the bus: askers ask again, and we read again."""
        log.warning("not_decided job=%s events=%d error=%s", self._name, len(pending), error)
        self._revision = None
        self._wake_at = self._around.clock.now() + _RETRY_S
        text = f"job {self._name}: its document could not be written ({error}); ask again"
        _refuse(pending, RefusalError("503", text))
        for event, answer in pending:
            if answer is None and not isinstance(event, Tick):
                self._events.append((event, None))

    def _pass_over(self, pending: Pending, error: Exception) -> None:
        """Drop the batch and read the document again, which has nothing of the batch."""
        names = ", ".join(sorted({type(event).__name__ for event, _ in pending}))
        self._input_failures.note(f"events {names or 'of time'}", error)
        self._revision, self._memory = None, ReplicaMemory()
        self._wake_at = self._around.clock.now() + _RETRY_S
        _refuse(pending, RefusalError("500", "rendezvous failed: see its log"))

    def _leave_alone(self, pending: Pending, error: UnreadableRoundError) -> None:
        """Leave the job alone until somebody writes its document; other jobs must not suffer."""
        if self._unreadable != str(error):
            self._unreadable = str(error)
            log.error("document_unreadable job=%s error=%s", self._name, error)
        self._revision, self._wake_at = None, None
        _refuse(pending, RefusalError("503", str(error)))

    def _now(self) -> Now:
        return Now(self._around.clock.now(), self._around.clock.wall(), new_id)


def _decoded(job: str, data: bytes) -> RoundDocument:
    try:
        return _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise UnreadableRoundError(job, str(error)) from error


def may_be_outdated(events: Sequence[Event], outcome: BatchOutcome) -> bool:
    """Whether agents report or leave that only a newer document may know.

    An agent does not repeat a report that was answered.
    """
    pairs = zip(events, outcome.replies, strict=True)
    return any(
        isinstance(event, Leave) or (isinstance(reply, Reported) and not reply.is_current)
        for event, reply in pairs
    )


def _no_such_job(job: str, pending: Pending) -> None:
    """Answer for a job without a document; agents that run ranks keep them."""
    for event, answer in pending:
        if answer is None or answer.done():
            continue
        if isinstance(event, Report):
            answer.set_result(Reported(round=event.round, is_current=False))
        elif isinstance(event, Leave):
            answer.set_result(Done(text="there is no such job"))
    _refuse(pending, RefusalError("404", f"there is no job {job}: join it first"))


def _refuse(pending: Pending, error: RefusalError) -> None:
    for _, answer in pending:
        if answer is not None and not answer.done():
            answer.set_exception(error)
