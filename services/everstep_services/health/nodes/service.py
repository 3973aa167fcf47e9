"""Keeps the register of nodes: reads every fact, writes what it comes to, carries it out."""

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from msgspec.structs import replace

from everstep.bus.asking import RefusalError
from everstep.bus.containment import Containment
from everstep.bus.decided import facts_in
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.leading import Term, lead_for_ever
from everstep.bus.ports import Batch, Bus, StreamPosition
from everstep.bus.recorder import Recorder
from everstep.bus.seats import SeatedOnly
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import ControlDocument, Exclusion, Fact, NodeIncluded, kind_of
from everstep_services.health.nodes.control import enforces_exclusions, reconciled
from everstep_services.health.nodes.control_documents import Switches
from everstep_services.health.nodes.evidence import accused
from everstep_services.health.nodes.exclusions import Circumstances, decide, exiled
from everstep_services.health.nodes.register import Moment, Register
from everstep_services.health.nodes.stored import KEY, Stored, fact_of, rules_of
from everstep_services.health.settings import NodeSettings

T = TypeVar("T")
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


class _OvertakenError(BusError):
    """Somebody else has read on: the lease went to another replica."""


@dataclass(frozen=True, slots=True)
class _Turn:
    """What one look at the stream brought."""

    facts: list[Fact]
    position: StreamPosition
    is_due: bool
    """Nodes are to be judged: everything was read, and it is time."""
    is_old: bool
    """The position that is stored lags behind."""


class Registrar:
    """One of any number of replicas; the one with the lease reads on, any may be asked."""

    def __init__(
        self,
        settings: NodeSettings,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        count_nodes: Callable[[], int],
    ) -> None:
        self._rules = rules_of(settings)
        self._judge_every_s = settings.judge_every_s
        self._bus = bus
        self._clock = clock
        self._records = records
        self._count_nodes = count_nodes
        self._documents = bus.documents("NODES")
        self._switches = Switches(bus)
        self._seated = SeatedOnly(bus, clock, accused)
        self._counts: Counter[str] = Counter()
        self._contained = Containment("the register of nodes")
        self._levels: dict[str, float] = dict.fromkeys(_LEVELS, 0.0)

    def statistics(self) -> dict[str, float]:
        """What it knows and counted so far, for metrics."""
        names = ("facts_read", "facts_missed", "node_conflicts")
        return {
            **self._levels,
            **{f"{name}_total": float(self._counts[name]) for name in names},
            "facts_not_believed_total": float(self._seated.refused),
        }

    def moment(self) -> Moment:
        """Now."""
        return Moment(self._clock.wall(), new_id)

    async def keep_for_ever(self) -> None:
        """Whenever the lease is free, take it and read on; survive the bus."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._keep)

    async def read(self) -> Register:
        """How it stands."""
        return (await self._load()).register

    async def change(self, deed: Callable[[Register, Moment], T]) -> T:
        """Do something to the register, and write it."""
        for _ in range(_ATTEMPTS):
            stored = await self._load()
            done = deed(stored.register, self.moment())
            if not stored.register.is_changed:
                return done
            try:
                await self._put(stored, stored.position)
            except ConflictError:
                self._counts["node_conflicts"] += 1
                continue
            self._records.keep(*stored.register.facts)
            return done
        raise RefusalError("503", "others change what is known of nodes all the time: ask again")

    async def _keep(self, term: Term) -> None:
        try:
            stored = await self._load()
            judged = written = self._clock.now()
            async with self._bus.facts(stored.position) as reader:
                self._levels["judging"] = 1.0
                while True:
                    batch = await reader.fetch(_BATCH, min(_FETCH_S, self._judge_every_s))
                    facts = await self._seated.passed(self._facts(batch))
                    now = self._clock.now()
                    turn = _Turn(
                        facts,
                        batch.position,
                        is_due=len(batch.facts) < _BATCH
                        and (bool(facts) or now - judged >= self._judge_every_s),
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

    async def _take_turn(self, stored: Stored, turn: _Turn) -> Stored:
        """Take what was read, judge, write, carry out. Whoever wrote meanwhile goes first."""
        before = stored.position
        for _ in range(_ATTEMPTS):
            if stored.position != before:
                raise _OvertakenError("another replica has read the facts meanwhile")
            control, revision = await self._switches.read(KEY)
            self._apply(stored.register, turn, control)
            if self._is_to_be_written(stored, turn):
                await self._record(stored.outbox)
                stored.outbox = ()
                try:
                    await self._put(stored, turn.position)
                except ConflictError:
                    self._counts["node_conflicts"] += 1
                    stored = await self._load()
                    continue
                said = stored.said
                await self._record(said)
                stored.settle(turn.position, said)
            if turn.is_due:
                await self._carry_out(stored.register, control, revision)
            return stored
        raise BusError(f"nodes: {_ATTEMPTS} writes in a row came second")

    def _is_to_be_written(self, stored: Stored, turn: _Turn) -> bool:
        is_news = stored.register.is_changed or bool(stored.outbox)
        return is_news or turn.is_old or (turn.is_due and stored.is_untidy)

    def _apply(self, register: Register, turn: _Turn, control: ControlDocument) -> None:
        now = self.moment()
        for fact in turn.facts:
            with self._contained.of(kind_of(fact)):
                register.take(fact, now)
        if turn.is_due:
            register.judge(now)
            around = Circumstances(self._count_nodes(), enforces_exclusions(control))
            decide(register, around, now)

    async def _carry_out(self, register: Register, control: ControlDocument, revision: int) -> None:
        """Make the switches say whom we keep out, and drop exclusions whose time is over."""
        out = exiled(register)
        self._measure(register, len(out))
        ours = [
            Exclusion(
                node=node,
                by="health",
                reason=one.reason,
                until=one.at + timedelta(seconds=one.ttl_s),
            )
            for node, one in out.items()
        ]
        new, over = reconciled(control, ours, self._clock.wall())
        if new == control:
            return
        new = replace(new, changed_by="health", reason="the exclusions of nodes have changed")
        with contextlib.suppress(ConflictError):  # the next turn sees what was written
            await self._switches.put(KEY, new, revision)
            self._records.keep(*(self._over(one) for one in over))

    def _over(self, exclusion: Exclusion) -> NodeIncluded:
        text = f"included\n{exclusion.node}\n{exclusion.until}\n{exclusion.by}"
        return NodeIncluded(
            id=hashlib.blake2b(text.encode(), digest_size=16).hexdigest(),
            job=KEY,
            at=self._clock.wall(),
            source="health",
            node=exclusion.node,
            by="health",
            reason=f"the time for which {exclusion.by} excluded it is over",
        )

    async def _load(self) -> Stored:
        return Stored(await self._documents.get(KEY), self._rules)

    async def _put(self, stored: Stored, position: StreamPosition | None) -> None:
        data = stored.encoded(position)
        stored.revision = await self._documents.put(KEY, data, revision=stored.revision)

    async def _record(self, outbox: Iterable[str]) -> None:
        for fact in facts_in(outbox):
            await self._bus.record(fact)

    def _facts(self, batch: Batch) -> list[Fact]:
        self._counts["facts_read"] += len(batch.facts)
        self._counts["facts_missed"] += batch.missed
        found = (fact_of(one) for one in batch.facts)
        return [fact for fact in found if fact is not None]

    def _measure(self, register: Register, excluded: int) -> None:
        records = register.nodes.values()
        self._levels |= {
            "nodes_known": float(len(records)),
            "nodes_suspect": float(sum(bool(one.suspicion) for one in records)),
            "nodes_excluded": float(excluded),
            "checks_distrusted": float(len(register.distrusted)),
            "breaker_open": float(register.opened_at is not None),
        }
