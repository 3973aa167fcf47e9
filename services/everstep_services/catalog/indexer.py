"""Keeps the index: reads every fact, writes what it comes to."""

import logging
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

from everstep.bus.asking import RefusalError
from everstep.bus.containment import Containment
from everstep.bus.decided import facts_in
from everstep.bus.errors import BusError, ConflictError, MessageTooLargeError
from everstep.bus.leading import Term, lead_for_ever
from everstep.bus.ports import Batch, Bus, StreamPosition
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import CheckpointsDocument, Fact, kind_of
from everstep.messages.codec import encode
from everstep.subjects import CLUSTER, BadSubjectError
from everstep_services.catalog.domain.facts import take
from everstep_services.catalog.domain.index import Index, Moment
from everstep_services.catalog.stored import BUCKET, Stored, UnreadableError, fact_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Deed = Callable[[Index, Moment], T]
_LEASE = "catalog"
_BATCH = 1000
_FETCH_S = 1.0
_WRITE_EVERY_S = 10.0
_ATTEMPTS = 20


class Indexer:
    """One of any number of replicas; the one with the lease reads on, any may be asked."""

    def __init__(self, bus: Bus, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._documents = bus.documents(BUCKET)
        self._jobs: dict[str, Stored] = {}
        self._counts: Counter[str] = Counter()
        self._contained = Containment("the index")
        self.leads = False
        """This replica reads on, and does what is to be done by itself."""

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        known = [one for stored in self._jobs.values() for one in stored.index.known.values()]
        names = ("facts_read", "facts_missed", "conflicts")
        return {
            "leading": float(self.leads),
            "input_failures_total": float(self._contained.failures),
            "jobs": float(sum(not one.index.is_blank for one in self._jobs.values())),
            "checkpoints": float(len(known)),
            "quarantined": float(sum(bool(one.quarantined_for) for one in known)),
            "missing": float(sum(one.missing_since is not None for one in known)),
            "degraded": float(
                sum(one.index.survivable_losses is not None for one in self._jobs.values())
            ),
            **{f"{name}_total": float(self._counts[name]) for name in names},
        }

    async def keep_for_ever(self) -> None:
        """Whenever the lease is free, take it and read on; survive the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._keep)

    async def read(self, job: str) -> Index:
        """How it stands with a job's checkpoints."""
        return (await self._load(job)).index

    def known(self) -> list[tuple[str, Index]]:
        """Every job, as the replica that leads has it; what is done about one looks again."""
        return [(job, one.index) for job, one in self._jobs.items() if not one.index.is_blank]

    async def change(self, job: str, deed: Deed[T]) -> T:
        """Do something to a job's index, write it, and put on record what it says."""
        for _ in range(_ATTEMPTS):
            stored = await self._load(job)
            done = deed(stored.index, self.moment())
            if not stored.is_changed:
                return done
            if await self._write(stored):
                if self.leads:
                    self._jobs[job] = stored
                return done
        raise RefusalError("503", f"others change what is known of {job} all the time: ask again")

    def moment(self) -> Moment:
        """Now."""
        return Moment(self._clock.wall(), new_id)

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

    async def _take(self, batch: Batch) -> None:
        self._counts["facts_read"] += len(batch.facts)
        self._counts["facts_missed"] += batch.missed
        by_job: dict[str, list[tuple[StreamPosition, Fact]]] = {}
        for one in batch.facts:
            fact = fact_of(one)
            if fact is not None:
                at = StreamPosition(batch.position.stream, one.sequence)
                by_job.setdefault(fact.job, []).append((at, fact))
        for job, facts in by_job.items():
            try:
                await self._take_of(job, facts)
            except (UnreadableError, MessageTooLargeError, BadSubjectError) as error:
                self._jobs.pop(job, None)
                log.warning("job_passed_over job=%s error=%s", job, error)

    async def _take_of(self, job: str, facts: list[tuple[StreamPosition, Fact]]) -> None:
        for _ in range(_ATTEMPTS):
            stored = self._jobs.get(job) or await self._load(job)
            self._jobs[job] = stored
            for at, fact in facts:
                if not stored.has_read(at):
                    with self._contained.of(kind_of(fact)):
                        take(stored.index, fact, self.moment())
                    stored.stream, stored.sequence = at.stream, at.sequence
            if not stored.is_changed or await self._write(stored):
                return
            self._jobs.pop(job, None)
        raise BusError(f"checkpoints of {job}: {_ATTEMPTS} writes in a row came second")

    async def _write(self, stored: Stored) -> bool:
        """False when somebody else wrote first."""
        for fact in facts_in(stored.outbox):
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
                except UnreadableError as error:
                    log.warning("job_passed_over job=%s error=%s", job, error)

    async def _load(self, job: str) -> Stored:
        return Stored(await self._documents.get(job))

    async def _position(self) -> StreamPosition | None:
        stored = await self._load(CLUSTER)
        self._revision = stored.revision
        return StreamPosition(stored.stream, stored.sequence) if stored.stream else None

    async def _put_position(self, position: StreamPosition) -> None:
        document = CheckpointsDocument(stream=position.stream, sequence=position.sequence)
        data = encode(document)
        self._revision = await self._documents.put(CLUSTER, data, revision=self._revision)
