"""Keeps the register of nodes: reads every fact, writes the document, carries out decisions."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from everstep.bus.errors import BusError, ConflictError
from everstep.bus.facts import codec
from everstep.bus.facts.recorder import Recorder
from everstep.bus.facts.trusted_facts import TrustedFacts
from everstep.bus.input_failures import InputFailures
from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus, Document, FactBatch, StreamPosition
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import ControlDocument, Exclusion, Fact, NodeIncluded, NodesDocument, kind_of
from everstep.messages.codec import encode
from everstep.messages.facts.stamp import FactStamp
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.control import binds, enforces_exclusions, reconciled
from everstep_services.health.nodes.control_documents import ControlDocuments
from everstep_services.health.nodes.evidence import READ, accused
from everstep_services.health.nodes.exclusions import ExclusionScope, decide, exiled
from everstep_services.health.nodes.register import NodeRegister
from everstep_services.health.settings import NodeSettings

T = TypeVar("T")
_KEY = CLUSTER
_LEASE = "health-nodes"
_BATCH = 1000
_FETCH_S = 2.0
_WRITE_EVERY_S = 10.0
_ATTEMPTS = 20
_LEVELS = (
    "judging",
    "nodes_known",
    "nodes_suspect",
    "nodes_excluded",
    "checks_distrusted",
    "breaker_open",
)
_KINDS = frozenset(kind_of(fact) for fact in READ)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(NodesDocument)


class UnreadableNodesError(EverstepError):
    """The stored document cannot be decoded. Health decides nothing from it."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"health cannot read the document of nodes ({why}): a newer release may have written "
            f"it; otherwise look at key {_KEY} of bucket NODES, and remove it"
        )


class StoredRegister:
    """The register as of one revision of its document."""

    def __init__(self, document: Document, settings: NodeSettings) -> None:
        try:
            data = document.data
            body = NodesDocument() if data is None else _DECODER.decode(data)
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableNodesError(str(error)) from error
        self.revision = document.revision if document.data is not None else 0
        self.position = StreamPosition(body.stream, body.sequence) if body.stream else None
        self.outbox = body.outbox
        """Facts in the document that may not be recorded yet."""
        self.is_untidy = False
        """The document holds facts that are recorded."""
        self.register = NodeRegister(body, settings)

    def settle(self, position: StreamPosition, recorded: tuple[str, ...]) -> None:
        """The document is written and its facts are recorded: the next write omits them."""
        self.register.facts, self.register.is_changed = [], False
        self.position = position
        self.is_untidy = bool(recorded)

    @property
    def decided(self) -> tuple[str, ...]:
        """The facts that were decided since the document was read."""
        return tuple(encode(fact).decode() for fact in self.register.facts)

    def encoded(self, position: StreamPosition | None) -> bytes:
        """The document to write."""
        at = position or StreamPosition("", 0)
        document = self.register.document(at.stream, at.sequence, self.outbox + self.decided)
        return _ENCODER.encode(document)


@dataclass(frozen=True, slots=True)
class _Turn:
    """The facts of one read of the stream."""

    facts: list[Fact]
    position: StreamPosition
    is_due: bool
    """It is time to judge the nodes, and every fact was read."""
    is_old: bool
    """The stored position lags behind."""


class NodeService:
    """One of any number of replicas. The replica with the lease reads on; all answer questions."""

    def __init__(
        self,
        settings: NodeSettings,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        count_nodes: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._records = records
        self.count = count_nodes
        """The number of nodes that are there."""
        self._documents = bus.documents("NODES")
        self._control = ControlDocuments(bus)
        self._seated = TrustedFacts(bus, clock, accused)
        self._counts: Counter[str] = Counter()
        self._input_failures = InputFailures("the register of nodes")
        self._levels: dict[str, float] = dict.fromkeys(_LEVELS, 0.0)

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        names = ("facts_read", "facts_missed", "node_conflicts")
        return {
            **self._levels,
            **{f"{name}_total": float(self._counts[name]) for name in names},
            "facts_not_believed_total": float(self._seated.refused),
        }

    async def keep_for_ever(self) -> None:
        """Take the lease whenever it is free, and read on; survive the loss of the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._keep)

    async def read(self) -> NodeRegister:
        """The register as it is stored."""
        return (await self._load()).register

    async def change(self, action: Callable[[NodeRegister, FactStamp], T]) -> T:
        """Apply `action` to the register, and write it; return what `action` returns."""
        for _ in range(_ATTEMPTS):
            stored = await self._load()
            outcome = action(stored.register, self._now())
            if not stored.register.is_changed:
                return outcome
            try:
                await self._put(stored, stored.position)
            except ConflictError:
                self._counts["node_conflicts"] += 1
                continue
            self._records.keep(*stored.register.facts)
            return outcome
        raise RefusalError("503", "other replicas keep changing the document of nodes: ask again")

    def _now(self) -> FactStamp:
        return FactStamp(self._clock.wall(), new_id, "health")

    async def _keep(self, term: Term) -> None:
        try:
            stored = await self._load()
            judged = written = self._clock.now()
            judge_every_s = self._settings.judge_every_s
            async with self._bus.facts(stored.position) as reader:
                self._levels["judging"] = 1.0
                while True:
                    batch = await reader.fetch(_BATCH, min(_FETCH_S, judge_every_s))
                    facts = await self._seated.passed(self._facts(batch))
                    now = self._clock.now()
                    turn = _Turn(
                        facts,
                        batch.position,
                        is_due=len(batch.facts) < _BATCH
                        and (bool(facts) or now - judged >= judge_every_s),
                        is_old=batch.position != stored.position
                        and now - written >= _WRITE_EVERY_S,
                    )
                    if facts or turn.is_due or turn.is_old:
                        stored = await self._take_turn(stored, turn)
                        judged = now if turn.is_due else judged
                        written = now if turn.is_old else written
                    await term.renew()
        finally:
            self._levels["judging"] = 0.0

    async def _take_turn(self, stored: StoredRegister, turn: _Turn) -> StoredRegister:
        """Apply the facts, judge, write, carry out. If another replica wrote, begin with that."""
        before = stored.position
        for _ in range(_ATTEMPTS):
            if stored.position != before:
                raise _OvertakenError("another replica has read the facts in the meantime")
            control, revision = await self._control.read(_KEY)
            self._apply(stored.register, turn, control)
            if self._must_write(stored, turn):
                await self._record(stored.outbox)
                stored.outbox = ()
                try:
                    await self._put(stored, turn.position)
                except ConflictError:
                    self._counts["node_conflicts"] += 1
                    stored = await self._load()
                    continue
                facts = stored.decided
                await self._record(facts)
                stored.settle(turn.position, facts)
            if turn.is_due:
                await self._carry_out(stored.register, control, revision)
            return stored
        raise BusError(f"nodes: other replicas were faster in {_ATTEMPTS} writes in a row")

    def _must_write(self, stored: StoredRegister, turn: _Turn) -> bool:
        is_news = stored.register.is_changed or bool(stored.outbox)
        return is_news or turn.is_old or (turn.is_due and stored.is_untidy)

    def _apply(self, register: NodeRegister, turn: _Turn, control: ControlDocument) -> None:
        now = self._now()
        for fact in turn.facts:
            with self._input_failures.caught(kind_of(fact)):
                register.apply(fact, now)
        if turn.is_due:
            register.judge(now)
            scope = ExclusionScope(
                self.count(),
                enforces_exclusions(control),
                enforces_probes=self._settings.exclude_by_probes and binds(control),
            )
            decide(register, scope, now)

    async def _carry_out(
        self, register: NodeRegister, control: ControlDocument, revision: int
    ) -> None:
        """Write the exclusions by health into the switches, and drop those that are over."""
        exiles = exiled(register)
        self._measure(register, len(exiles))
        ours = [
            Exclusion(
                node=node,
                by="health",
                reason=exile.reason,
                until=exile.at + timedelta(seconds=exile.ttl_s),
            )
            for node, exile in exiles.items()
        ]
        new, over = reconciled(control, ours, self._clock.wall())
        if new == control:
            return
        new = replace(new, changed_by="health", reason="the exclusions of nodes have changed")
        with contextlib.suppress(ConflictError):  # the next turn sees what was written
            await self._control.put(_KEY, new, revision)
            self._records.keep(*(self._included(exclusion) for exclusion in over))

    def _included(self, exclusion: Exclusion) -> NodeIncluded:
        return NodeIncluded(
            id=new_id(),
            job=_KEY,
            at=self._clock.wall(),
            source="health",
            node=exclusion.node,
            by="health",
            reason=f"the time for which {exclusion.by} excluded it is over",
        )

    async def _load(self) -> StoredRegister:
        return StoredRegister(await self._documents.get(_KEY), self._settings)

    async def _put(self, stored: StoredRegister, position: StreamPosition | None) -> None:
        data = stored.encoded(position)
        stored.revision = await self._documents.put(_KEY, data, revision=stored.revision)

    async def _record(self, outbox: Iterable[str]) -> None:
        for fact in codec.facts_in(outbox):
            await self._bus.record(fact)

    def _facts(self, batch: FactBatch) -> list[Fact]:
        self._counts["facts_read"] += len(batch.facts)
        self._counts["facts_missed"] += batch.missed
        facts = (codec.fact_of(message, _KINDS) for message in batch.facts)
        return [fact for fact in facts if fact is not None]

    def _measure(self, register: NodeRegister, excluded: int) -> None:
        records = register.nodes.values()
        self._levels |= {
            "nodes_known": float(len(records)),
            "nodes_suspect": float(sum(bool(record.suspicion) for record in records)),
            "nodes_excluded": float(excluded),
            "checks_distrusted": float(len(register.distrusted)),
            "breaker_open": float(register.opened_at is not None),
        }


class _OvertakenError(BusError):
    """Another replica has the lease and has read on."""
