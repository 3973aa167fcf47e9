"""A job's document in a mutable form, so that one seat can change at a time."""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Literal, TypedDict, Unpack

from msgspec.structs import replace

from everstep.messages import Budget, Fact, JobSpec, Replication, RoundDocument, Seat, StartRanks
from everstep.messages.base import Time
from everstep.messages.documents.rounds import (
    AgreedSave,
    OpenCheck,
    OpenDecision,
    OpenIncident,
    OpenNetworkTest,
    OpenStall,
    PlannedEnd,
)
from everstep.observe.printable import beginning
from everstep_services.rendezvous.domain.replica_placement import ReplicaHolders

Phase = Literal["joining", "forming", "running", "ending", "done", "stopped"]
Stage = Literal["idle", "starting", "running", "finished", "stopping", "absent", "gone"]
AT_WORK: frozenset[Stage] = frozenset({"starting", "running", "finished"})
OVER: frozenset[Phase] = frozenset({"done", "stopped"})
_FORMER_LEAST = 1024
_REASON_MOST = 200


class DocumentChanges(TypedDict, total=False):
    """The fields of `RoundDocument` that decisions change, with its types."""

    round: int
    phase: Phase
    spec: JobSpec
    allocation: str
    phase_since: Time
    reason: str
    slots: int
    world_size: int
    master_address: str
    master_port: int
    start_order: str
    stop_order: str
    warm_ranks: int
    has_stepped: bool
    has_ever_stepped: bool
    is_mendable: bool
    first_step: int | None
    restore_s: float
    heal_s: float
    healed: str
    survives: int
    are_kept: bool
    round_step: int | None
    reached_step: int | None
    incident: OpenIncident | None
    end_reason: str
    planned: PlannedEnd | None
    saving: AgreedSave | None
    stalls: tuple[OpenStall, ...]
    checks: tuple[OpenCheck, ...]
    network: OpenNetworkTest | None
    replication: Replication | None
    decisions: tuple[OpenDecision, ...]
    restarts: int
    refilled: int
    recent: tuple[int, ...]
    quick_failures: int
    idle_rounds: int
    is_moved: bool
    budgets: tuple[Budget, ...]
    last_step: int | None
    fingerprints: tuple[str, ...]
    allocations: tuple[str, ...]
    waiting: str
    refused: tuple[str, ...]
    exit_code: int | None


def with_stage(seat: Seat, stage: Stage) -> Seat:
    """The same seat in another stage."""
    return replace(seat, stage=stage)


class JobState:
    """The state of a job. Every change goes through a method, so that none is missed."""

    def __init__(self, document: RoundDocument) -> None:
        self.doc = replace(document, seats=(), former=(), outbox=())
        self.outbox: dict[str, Fact | None] = dict.fromkeys(document.outbox)
        """Facts by their text in the document; None where another replica decided them."""
        self.is_changed = False
        self._seats = {seat.node: seat for seat in document.seats}
        self._former = dict.fromkeys(document.former)
        self._stages = Counter(seat.stage for seat in document.seats)
        self._infra = {
            seat.infra_rank: seat.node for seat in document.seats if seat.infra_rank is not None
        }
        self._leaving = sum(seat.is_leaving for seat in document.seats)
        self._layout: dict[str, int] | None = None
        self._holders: ReplicaHolders | None = None

    def document(self) -> RoundDocument:
        """Return the document to write."""
        return replace(
            self.doc,
            seats=tuple(self._seats.values()),
            former=tuple(self._former),
            outbox=tuple(self.outbox),
        )

    def set(self, **changes: Unpack[DocumentChanges]) -> None:
        """Change fields of the document."""
        self.doc = replace(self.doc, **changes)
        if "replication" in changes:
            self._holders = None
        self.is_changed = True

    @property
    def ordered_stop(self) -> tuple[int, str] | None:
        """The exit code and the reason of a stop of the job that waits for its round to end."""
        planned = self.doc.planned
        if planned is None or planned.exit_code is None:
            return None
        return planned.exit_code, planned.reason

    def seat(self, node: str) -> Seat | None:
        return self._seats.get(node)

    @property
    def seats(self) -> Iterator[Seat]:
        """All seats; copy them to a list before you change any in a loop."""
        return iter(self._seats.values())

    def count(self, *stages: Stage) -> int:
        """Return how many seats are in one of these stages."""
        return sum(self._stages[stage] for stage in stages)

    @property
    def present(self) -> int:
        """The number of agents that are present."""
        return len(self._seats) - self._stages["gone"]

    @property
    def is_left(self) -> bool:
        """Whether nodes are being taken away from the job."""
        return self._leaving > 0

    @property
    def leaving(self) -> list[Seat]:
        """The nodes that must be replaced and have no ranks any more."""
        if not self._leaving:
            return []
        return [seat for seat in self.in_stage("idle") if seat.is_leaving]

    @property
    def members(self) -> list[Seat]:
        """The holders of this round's slots, in order."""
        held = [seat for seat in self._seats.values() if seat.slot is not None]
        return sorted(held, key=lambda seat: seat.slot or 0)

    def in_stage(self, *stages: Stage) -> list[Seat]:
        """Return the seats that are in one of these stages."""
        if not self.count(*stages):
            return []
        return [seat for seat in self._seats.values() if seat.stage in stages]

    def holder_of_infra_rank(self, infra_rank: int) -> str | None:
        """Return the present node with this infra rank."""
        node = self._infra.get(infra_rank)
        seat = self._seats.get(node) if node is not None else None
        return None if seat is None or seat.stage == "gone" else node

    def put(self, seat: Seat) -> None:
        """Add or replace a seat."""
        before = self._seats.get(seat.node)
        if before == seat:
            return
        if before is not None:
            self._forget(before)
        self._seats[seat.node] = seat
        self._former.pop(seat.node, None)
        self._stages[seat.stage] += 1
        self._leaving += seat.is_leaving
        if seat.infra_rank is not None:
            self._infra[seat.infra_rank] = seat.node
        self._layout = self._holders = None
        self.is_changed = True

    def send_away(self, seat: Seat, because: str) -> None:
        """Have a node leave, as soon as it has no ranks."""
        self.put(replace(seat, is_leaving=True, leaves_because=beginning(because, _REASON_MOST)))

    def drop(self, node: str) -> None:
        """Forget a node."""
        before = self._seats.pop(node, None)
        if before is not None:
            self._forget(before)
            self._remember([node])
            self._layout = self._holders = None
            self.is_changed = True

    def replace_all(self, seats: list[Seat]) -> None:
        """Replace all seats when a round forms."""
        before, self._seats = self._seats, {seat.node: seat for seat in seats}
        self._remember(node for node in before if node not in self._seats)
        self._stages = Counter(seat.stage for seat in seats)
        self._leaving = sum(seat.is_leaving for seat in seats)
        self._infra = {seat.infra_rank: seat.node for seat in seats if seat.infra_rank is not None}
        self._layout = self._holders = None
        self.is_changed = True

    def first_rank(self, node: str) -> int:
        """Return the global rank of a member's first process."""
        if self._layout is None:
            self._layout, rank = {}, 0
            for seat in self.members:
                self._layout[seat.node] = rank
                rank += seat.ranks
        return self._layout[node]

    def start_order(self, seat: Seat) -> StartRanks:
        """Return this member's order to start its ranks."""
        doc, slot, holders = self.doc, seat.slot or 0, self._replica_holders()
        return StartRanks(
            id=doc.start_order,
            job=doc.job,
            round=doc.round,
            reason=doc.reason,
            slot=slot,
            slots=doc.slots,
            first_rank=self.first_rank(seat.node),
            ranks=seat.ranks,
            world_size=doc.world_size,
            master_address=doc.master_address,
            master_port=doc.master_port,
            reached_step=doc.reached_step,
            restarts=doc.restarts,
            max_restarts=doc.spec.max_restarts,
            incident=doc.incident.id if doc.incident else None,
            replica_peers=holders.peers(slot),
            replica_sources=holders.sources(slot),
            replica_key=holders.key,
            replica_parts_needed=holders.parts_needed,
        )

    def _replica_holders(self) -> ReplicaHolders:
        if self._holders is None:
            replication = self.doc.replication or Replication(key="")
            self._holders = ReplicaHolders(
                replication, self._seats.values() if replication.factor else ()
            )
        return self._holders

    def _remember(self, nodes: Iterable[str]) -> None:
        """Remember nodes without a seat, because late facts about them still belong to this job."""
        for node in nodes:
            self._former.pop(node, None)
            self._former[node] = None
        while len(self._former) > max(_FORMER_LEAST, self.doc.slots):
            del self._former[next(iter(self._former))]

    def _forget(self, seat: Seat) -> None:
        self._stages[seat.stage] -= 1
        self._leaving -= seat.is_leaving
        if seat.infra_rank is not None and self._infra.get(seat.infra_rank) == seat.node:
            del self._infra[seat.infra_rank]
