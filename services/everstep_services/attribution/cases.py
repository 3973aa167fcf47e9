"""Keeps the cases of all jobs: reads every fact, writes a document a job."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

import msgspec

from everstep.bus.errors import ConflictError, MessageTooLargeError
from everstep.bus.facts import codec
from everstep.bus.facts.codec import facts_in
from everstep.bus.facts.trusted_facts import TrustedFacts
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Delivered, Document, FactBatch, StreamPosition
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import Case, CasesDocument, Fact, VerdictReached, kind_of
from everstep.messages.codec import encode
from everstep.subjects import CLUSTER, BadSubjectError
from everstep_services.attribution.domain import case_facts, past
from everstep_services.attribution.domain.case_facts import JobCases
from everstep_services.attribution.domain.past import PastIncidents
from everstep_services.attribution.domain.verdicts import VerdictContext

log = logging.getLogger(__name__)


BUCKET = "CASES"
_ENCODER = msgspec.json.Encoder()  # the body is compressed: it may be larger than a message
_DECODER = msgspec.json.Decoder(CasesDocument)
_KINDS = frozenset(kind_of(fact_type) for fact_type in (*case_facts.READ, *past.READ))
_PENDING_MOST = 10_000


class UnreadableCasesError(EverstepError):
    """The document of a job cannot be decoded; nothing is decided about it."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the document about incidents of {key} cannot be read ({why}): a newer release may "
            f"have written it; otherwise remove key {key} of bucket {BUCKET}"
        )


class StoredCases:
    """The cases of a job, and which facts are in them."""

    def __init__(self, document: Document) -> None:
        try:
            decoded = CasesDocument() if document.data is None else _DECODER.decode(document.data)
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableCasesError(document.key, str(error)) from error
        self.job = document.key
        self.revision = document.revision if document.data is not None else 0
        self.cases = JobCases(document.key, decoded)
        self.position = StreamPosition(decoded.stream, decoded.sequence)
        self.outbox = decoded.outbox
        """Facts in the stored document that may not have been recorded yet."""
        self.decided: list[Fact] = []
        """Facts to record with the next write."""
        self.pending: list[tuple[StreamPosition, Fact]] = []
        """Facts that were added since the document was stored."""
        self.has_news = False
        """Whether a case has changed, and must be written soon."""

    def has_read(self, at: StreamPosition) -> bool:
        """Whether the document already has the fact at this position."""
        return self.position.stream == at.stream and at.sequence <= self.position.sequence

    def take(self, at: StreamPosition, fact: Fact) -> str | None:
        """Add a fact. Returns the incident whose case has changed."""
        if self.has_read(at):
            return None
        before = self.cases.document.cases
        incident = self.cases.take(fact)
        self.position = at
        if self.cases.document.cases is not before:
            self.has_news = True
        if len(self.pending) < _PENDING_MOST:
            self.pending.append((at, fact))
        return incident

    def encoded(self) -> bytes:
        """Return the document to write."""
        facts = tuple(encode(fact).decode() for fact in self.decided)
        document = msgspec.structs.replace(
            self.cases.document,
            stream=self.position.stream,
            sequence=self.position.sequence,
            outbox=(*self.outbox, *facts),
        )
        return _ENCODER.encode(document)

    def settle(self, revision: int) -> None:
        """The document was written, and its decided facts were recorded."""
        self.revision = revision
        self.outbox = tuple(encode(fact).decode() for fact in self.decided)
        self.decided, self.pending, self.has_news = [], [], False


def cluster_document(data: bytes | None) -> CasesDocument:
    """The document of all jobs."""
    try:
        return CasesDocument() if data is None else _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadableCasesError("_cluster", str(error)) from error


def encoded(document: CasesDocument) -> bytes:
    """Return the bytes of a document."""
    return _ENCODER.encode(document)


def fact_of(message: Delivered) -> Fact | None:
    """Return a fact about incidents or nodes; None for any other, and for an unreadable one."""
    return codec.fact_of(message, _KINDS)


T = TypeVar("T")
Deed = Callable[[JobCases, VerdictContext], tuple[T, Iterable[Fact]]]
"""Changes cases, and returns the facts to record. It may be repeated on newer cases."""
Changed = Callable[[str, str], None]
"""Called with job and incident of each case that a fact has changed."""
_ATTEMPTS = 20


class CaseKeeper:
    """One of any number of replicas. The leader reads the stream; any replica may change a case."""

    def __init__(self, bus: Bus, clock: Clock, keep_days: int) -> None:
        self._bus = bus
        self._clock = clock
        self._keep = timedelta(days=keep_days)
        self._documents = bus.documents(BUCKET)
        self._jobs: dict[str, StoredCases] = {}
        self._lock = asyncio.Lock()
        self._revision = 0
        self._input_failures = InputFailures("the cases")
        self._seated = TrustedFacts(bus, clock, past.accused)
        self.history = PastIncidents(CasesDocument())
        self.counts: Counter[str] = Counter()
        self.leads = False

    @property
    def failures(self) -> int:
        """Facts whose handling failed."""
        return self._input_failures.failures

    @property
    def not_believed(self) -> int:
        """Checks of nodes that do not belong to the job that reported them."""
        return self._seated.refused

    def __len__(self) -> int:
        return len(self._jobs)

    def open_cases(self) -> Iterator[Case]:
        """The cases whose incident is not closed, as the leader has them."""
        for stored in self._jobs.values():
            yield from (case for case in stored.cases.cases if not case.outcome)

    def all_cases(self) -> Iterator[Case]:
        """All cases, as the leader has them."""
        for stored in self._jobs.values():
            yield from stored.cases.cases

    def unjudged(self) -> Iterator[Case]:
        """Cases without a verdict."""
        for stored in self._jobs.values():
            yield from (case for case in stored.cases.cases if case.verdict is None)

    def moment(self) -> VerdictContext:
        """The time, and how ids are made."""
        return VerdictContext(self._clock.wall(), new_id)

    def case(self, job: str, incident: str) -> Case | None:
        """The case as the leader has it."""
        stored = self._jobs.get(job)
        return None if stored is None else stored.cases.case(incident)

    async def read(self, job: str, incident: str) -> Case | None:
        """The case as it was written last, or as the leader has it."""
        if self.leads and (case := self.case(job, incident)) is not None:
            return case
        return (await self._load(job)).cases.case(incident)

    # --- leading ---

    async def begin(self) -> StreamPosition | None:
        """Load all cases, and return where to read on."""
        stored = await self._documents.get(CLUSTER)
        document = cluster_document(stored.data)
        self._revision = stored.revision if stored.data is not None else 0
        self.history = PastIncidents(document)
        for job in await self._documents.keys():
            if job != CLUSTER:
                try:
                    self._jobs[job] = await self._load(job)
                except UnreadableCasesError as error:
                    log.warning("job_passed_over job=%s error=%s", job, error)
        if not document.stream:
            return None
        return StreamPosition(document.stream, document.sequence)

    def end(self) -> None:
        """Forget all cases: another replica leads."""
        self.leads = False
        self._jobs.clear()

    async def take(self, batch: FactBatch, changed: Changed) -> None:
        """Add the facts of a batch to their cases."""
        self.counts["facts_read"] += len(batch.facts)
        self.counts["facts_missed"] += batch.missed
        async with self._lock:
            for logged in batch.facts:
                fact = fact_of(logged)
                if fact is not None:
                    at = StreamPosition(batch.position.stream, logged.sequence)
                    with self._input_failures.caught(kind_of(fact)):
                        await self._take(at, fact, changed)
            await self._remember()

    async def _take(self, at: StreamPosition, fact: Fact, changed: Changed) -> None:
        if isinstance(fact, case_facts.READ) and fact.job != CLUSTER:
            try:
                stored = self._jobs.get(fact.job) or await self._load(fact.job)
            except (UnreadableCasesError, BadSubjectError) as error:
                log.warning("fact_passed_over job=%s error=%s", fact.job, error)
                return
            self._jobs[fact.job] = stored
            incident = stored.take(at, fact)
            if incident is not None:
                changed(fact.job, incident)
        if isinstance(fact, past.READ):
            await self._remember(fact)

    async def _remember(self, *facts: Fact) -> None:
        """Add these facts to what all jobs share, and earlier facts that can be believed now."""
        for fact in await self._seated.passed(facts):
            self.history.take(fact, self._step_of(fact))

    def _step_of(self, fact: Fact) -> int | None:
        """The step of the training at the incident of a fact.

        A replica that begins reads facts again, when the job's document is ahead of them.
        """
        job = self._jobs.get(fact.job)
        if job is None:
            return None
        case = job.cases.case(fact.incident) if isinstance(fact, VerdictReached) else None
        return job.cases.document.step if case is None else case.last_step

    async def write_news(self) -> None:
        """Write the jobs whose cases have changed."""
        async with self._lock:
            for stored in [job for job in self._jobs.values() if job.has_news]:
                await self._write_or_again(stored)

    async def write_position(self, position: StreamPosition) -> None:
        """Write all cases that are not written yet, and the position in the stream."""
        async with self._lock:
            for stored in [job for job in self._jobs.values() if job.pending]:
                await self._write_or_again(stored)
            document = CasesDocument(
                stream=position.stream,
                sequence=position.sequence,
                past=self.history.past,
                nodes=self.history.signs,
            )
            self._revision = await self._documents.put(
                CLUSTER, encoded(document), revision=self._revision
            )

    async def forget_old(self) -> None:
        """Drop the cases of jobs that ended long ago."""
        now = self._clock.wall()
        async with self._lock:
            for job, stored in list(self._jobs.items()):
                ended = stored.cases.document.ended_at
                if ended is not None and now - ended > self._keep:
                    await self._documents.delete(job, revision=stored.revision)
                    del self._jobs[job]

    # --- changing ---

    async def change(self, job: str, deed: Deed[T]) -> T:
        """Change a job's cases, write them, and record the facts that the change decides."""
        async with self._lock:
            for _ in range(_ATTEMPTS):
                mine = self._jobs.get(job) if self.leads else None
                stored = mine or await self._load(job)
                done, facts = deed(stored.cases, self.moment())
                stored.decided = list(facts)
                if not stored.decided or await self._write(stored):
                    return done
        raise RefusalError("503", f"the cases of {job} change all the time: ask again")

    async def _write_or_again(self, stored: StoredCases) -> None:
        for _ in range(_ATTEMPTS):
            if await self._write(self._jobs.get(stored.job, stored)):
                return

    async def _write(self, stored: StoredCases) -> bool:
        """Return False if another replica wrote first; the job is then loaded again."""
        for fact in facts_in(stored.outbox):
            await self._bus.record(fact)
        stored.outbox = ()
        try:
            revision = await self._put(stored)
        except ConflictError:
            self.counts["conflicts"] += 1
            await self._reload(stored)
            return False
        for fact in stored.decided:
            await self._bus.record(fact)
        stored.settle(revision)
        return True

    async def _put(self, stored: StoredCases) -> int:
        while True:
            try:
                return await self._documents.put(
                    stored.job, stored.encoded(), revision=stored.revision
                )
            except MessageTooLargeError:
                if not stored.cases.make_room():
                    raise
                log.warning("cases_cut job=%s reason='its document is too large'", stored.job)

    async def _reload(self, stored: StoredCases) -> None:
        """Load the document of another replica, and add the facts that only this one has read."""
        if self._jobs.get(stored.job) is not stored:
            return
        fresh = await self._load(stored.job)
        for at, fact in stored.pending:
            fresh.take(at, fact)
        self._jobs[stored.job] = fresh

    async def _load(self, job: str) -> StoredCases:
        return StoredCases(await self._documents.get(job))
