"""Keeps the index of checkpoints: reads every fact, and writes one document a job."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import msgspec

from everstep.bus.errors import BusError, ConflictError, MessageTooLargeError
from everstep.bus.facts import codec
from everstep.bus.input_failures import InputFailures
from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus, Document, FactBatch, StreamPosition
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import CheckpointsDocument, Fact, kind_of
from everstep.messages.codec import encode
from everstep.messages.facts.stamp import FactStamp
from everstep.subjects import CLUSTER, BadSubjectError
from everstep_services.catalog.domain.facts import READ, apply
from everstep_services.catalog.domain.index import Index

log = logging.getLogger(__name__)

T = TypeVar("T")
Action = Callable[[Index, FactStamp], T]
_BUCKET = "CHECKPOINTS"
_LEASE = "catalog"
_BATCH = 1000
_FETCH_S = 1.0
_WRITE_EVERY_S = 10.0
_ATTEMPTS = 20
_ENCODER = msgspec.json.Encoder()  # the body is compressed: it may be larger than a message
_DECODER = msgspec.json.Decoder(CheckpointsDocument)
_KINDS = frozenset(kind_of(fact) for fact in READ)


class UnreadableIndexError(EverstepError):
    """The stored document cannot be decoded. The catalog decides nothing from it."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the catalog cannot read the index of {key} ({why}): a newer release may have "
            f"written it; otherwise remove key {key} of bucket {_BUCKET}, and scan"
        )


class StoredIndex:
    """A job's index as of one revision of its document."""

    def __init__(self, document: Document) -> None:
        try:
            data = document.data
            body = CheckpointsDocument() if data is None else _DECODER.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableIndexError(document.key, str(error)) from error
        self.job = document.key
        self.revision = document.revision if document.data is not None else 0
        self.index = Index(document.key, body)
        self.stream, self.sequence = body.stream, body.sequence
        self.outbox = body.outbox
        """Facts in the document that may not be recorded yet."""
        self._before = self.index.document("", 0, ())

    @property
    def is_changed(self) -> bool:
        """The index differs from the document that was read."""
        return bool(self.index.facts) or self.index.document("", 0, ()) != self._before

    @property
    def decided(self) -> tuple[str, ...]:
        """The facts that were decided since the document was read."""
        return tuple(encode(fact).decode() for fact in self.index.facts)

    def has_read(self, position: StreamPosition) -> bool:
        """The index has taken in the fact at this position already."""
        return self.stream == position.stream and position.sequence <= self.sequence

    def encoded(self) -> bytes:
        """The document to write."""
        return _ENCODER.encode(
            self.index.document(self.stream, self.sequence, self.outbox + self.decided)
        )

    def settle(self, revision: int) -> None:
        """The document is written, and its facts are recorded."""
        self.revision = revision
        self.outbox = self.decided
        self.index.facts = []
        self._before = self.index.document("", 0, ())


class Indexer:
    """One of any number of replicas. The replica with the lease reads on; all answer questions."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._documents = bus.documents(_BUCKET)
        self._jobs: dict[str, StoredIndex] = {}
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the index")
        self._revision = 0
        """Of the document with the position."""
        self.leads = False
        """This replica reads the facts, and does the regular maintenance."""

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        indexes = [stored.index for stored in self._jobs.values()]
        checkpoints = [checkpoint for index in indexes for checkpoint in index.known.values()]
        names = ("facts_read", "facts_missed", "conflicts")
        return {
            "leading": float(self.leads),
            "input_failures_total": float(self._input_failures.failures),
            "jobs": float(sum(not index.is_blank for index in indexes)),
            "checkpoints": float(len(checkpoints)),
            "quarantined": float(
                sum(bool(checkpoint.quarantined_for) for checkpoint in checkpoints)
            ),
            "missing": float(
                sum(checkpoint.missing_since is not None for checkpoint in checkpoints)
            ),
            "degraded": float(sum(index.survivable_losses is not None for index in indexes)),
            **{f"{name}_total": float(self._counts[name]) for name in names},
        }

    async def keep_for_ever(self) -> None:
        """Take the lease whenever it is free, and read on; survive the loss of the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._keep)

    async def read(self, job: str) -> Index:
        """A job's index as it is stored."""
        return (await self._load(job)).index

    def known(self) -> list[tuple[str, Index]]:
        """The indexes of all jobs as the leading replica has them; read one again to act on it."""
        return [
            (job, tracked.index)
            for job, tracked in self._jobs.items()
            if not tracked.index.is_blank
        ]

    async def change(self, job: str, action: Action[T]) -> T:
        """Apply `action` to a job's index, write it, and record its facts."""
        for _ in range(_ATTEMPTS):
            stored = await self._load(job)
            outcome = action(stored.index, self.now())
            if not stored.is_changed:
                return outcome
            if await self._write(stored):
                if self.leads:
                    self._jobs[job] = stored
                return outcome
        raise RefusalError("503", f"other replicas keep changing the index of {job}: ask again")

    def now(self) -> FactStamp:
        """The present time, for facts of the catalog."""
        return FactStamp(self._clock.wall(), new_id, "catalog")

    async def _keep(self, term: Term) -> None:
        try:
            position = await self._position()
            await self._load_all()
            written = self._clock.now()
            async with self._bus.facts(position) as reader:
                while True:
                    batch = await reader.fetch(_BATCH, _FETCH_S)
                    await self._take(batch)
                    now = self._clock.now()
                    self.leads = self.leads or len(batch.facts) < _BATCH
                    if batch.position != position and now - written >= _WRITE_EVERY_S:
                        await self._put_position(batch.position)
                        position, written = batch.position, now
                    await term.renew()
        finally:
            self.leads = False
            self._jobs.clear()

    async def _take(self, batch: FactBatch) -> None:
        self._counts["facts_read"] += len(batch.facts)
        self._counts["facts_missed"] += batch.missed
        by_job: dict[str, list[tuple[StreamPosition, Fact]]] = {}
        for message in batch.facts:
            fact = codec.fact_of(message, _KINDS)
            if fact is not None:
                at = StreamPosition(batch.position.stream, message.sequence)
                by_job.setdefault(fact.job, []).append((at, fact))
        for job, facts in by_job.items():
            try:
                await self._take_of(job, facts)
            except (UnreadableIndexError, MessageTooLargeError, BadSubjectError) as error:
                self._jobs.pop(job, None)
                log.warning("job_passed_over job=%s error=%s", job, error)

    async def _take_of(self, job: str, facts: list[tuple[StreamPosition, Fact]]) -> None:
        for _ in range(_ATTEMPTS):
            stored = self._jobs.get(job) or await self._load(job)
            self._jobs[job] = stored
            for at, fact in facts:
                if not stored.has_read(at):
                    with self._input_failures.caught(kind_of(fact)):
                        apply(stored.index, fact, self.now())
                    stored.stream, stored.sequence = at.stream, at.sequence
            if not stored.is_changed or await self._write(stored):
                return
            self._jobs.pop(job, None)
        raise BusError(f"index of {job}: other replicas were faster in {_ATTEMPTS} writes in a row")

    async def _write(self, stored: StoredIndex) -> bool:
        """Whether this replica was the first to write over the revision that it read."""
        for fact in codec.facts_in(stored.outbox):
            await self._bus.record(fact)
        stored.outbox = ()
        try:
            revision = await self._documents.put(
                stored.job, stored.encoded(), revision=stored.revision
            )
        except ConflictError:
            self._counts["conflicts"] += 1
            return False
        for fact in stored.index.facts:
            await self._bus.record(fact)
        stored.settle(revision)
        return True

    async def _load_all(self) -> None:
        for job in await self._documents.keys():
            if job != CLUSTER:
                try:
                    self._jobs[job] = await self._load(job)
                except UnreadableIndexError as error:
                    log.warning("job_passed_over job=%s error=%s", job, error)

    async def _load(self, job: str) -> StoredIndex:
        return StoredIndex(await self._documents.get(job))

    async def _position(self) -> StreamPosition | None:
        stored = await self._load(CLUSTER)
        self._revision = stored.revision
        return StreamPosition(stored.stream, stored.sequence) if stored.stream else None

    async def _put_position(self, position: StreamPosition) -> None:
        document = CheckpointsDocument(stream=position.stream, sequence=position.sequence)
        data = encode(document)
        self._revision = await self._documents.put(CLUSTER, data, revision=self._revision)
