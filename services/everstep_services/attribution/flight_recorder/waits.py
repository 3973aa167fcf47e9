"""The wait graph: ranks and meetings, each with an edge to every node that it waits for.

A meeting is a collective of a group, or a transfer between two ranks. A rank waits in the oldest
collective of each group that it has begun, and in its transfers. A meeting waits for the ranks
that have not come to it, and for older work that keeps a rank that has come from starting it.
Streams of a device may be independent, so older work of other groups counts only for a meeting
that nothing else explains.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from everstep_services.attribution.flight_recorder.graph import closing_components, components
from everstep_services.attribution.flight_recorder.mismatches import (
    CallTexts,
    Mismatch,
    find_mismatch,
)
from everstep_services.attribution.flight_recorder.ranges import named
from everstep_services.attribution.flight_recorder.report import Presence
from everstep_services.attribution.flight_recorder.siblings import next_calls, settled
from everstep_services.attribution.flight_recorder.summary import GroupRecord, Pending, RankSummary

Meeting = tuple[str, int]
"""A group's key and a sequence number."""
Node = Meeting | int
"""A meeting or a rank."""
_COMPARISONS_MOST = 16
"""Each looks at all groups. Where more groups are at odds, others like them settle nothing."""


@dataclass(slots=True)
class Group:
    """One process group, over all ranks that have a dump."""

    key: str
    members: tuple[int, ...] = ()
    records: dict[int, GroupRecord] = field(default_factory=dict)
    mismatch: Mismatch | None = None
    _late: dict[int, frozenset[int]] = field(default_factory=dict)

    def has_joined(self, rank: int, sequence: int) -> bool:
        record = self.records.get(rank)
        return record is not None and record.enqueued >= sequence

    def presence(self, rank: int, sequence: int, *, has_dump: bool) -> Presence:
        if not self.has_joined(rank, sequence):
            return "never_joined" if has_dump else "no_dump"
        record = self.records[rank]
        for pending in record.pending:
            if pending.peer is None and pending.sequence == sequence:
                return pending.state
        return "completed" if record.completed >= sequence else "scheduled"

    def differs_by(self, sequence: int) -> bool:
        """Whether ranks have called different operations up to this collective."""
        return self.mismatch is not None and self.mismatch.sequence <= sequence

    def everybody(self) -> tuple[int, ...]:
        return self.members or tuple(self.records)

    def place(self, index: int) -> int:
        """The rank with this place in the group."""
        return self.members[index] if index < len(self.members) else index

    def late(self, sequence: int) -> frozenset[int]:
        """The ranks whose devices have not started a collective that another's has."""
        if sequence not in self._late:
            self._late[sequence] = self._find_late(sequence)
        return self._late[sequence]

    def _find_late(self, sequence: int) -> frozenset[int]:
        if not any(record.knows_starts for record in self.records.values()):
            return frozenset()
        states = {rank: self.presence(rank, sequence, has_dump=True) for rank in self.records}
        if not {"started", "completed"} & set(states.values()):
            return frozenset()
        return frozenset(rank for rank, state in states.items() if state == "scheduled")


class WaitGraph:
    """All waits of a job."""

    def __init__(self, ranks: Mapping[int, RankSummary], world: int, texts: CallTexts) -> None:
        self.ranks = dict(sorted(ranks.items()))
        self.groups = _groups(self.ranks, world)
        self.last_to_come: dict[Meeting, tuple[int, Pending]] = {}
        """For each meeting that is not over, the rank that came last."""
        self.edges: dict[Node, set[Node]] = {rank: set() for rank in self.ranks}
        self.transfers: dict[int, list[tuple[int, str, Pending]]] = {}
        """For each rank that others wait for in transfers, the waiting ranks and their groups."""
        self._tensors: dict[tuple[Meeting, int], str] = {}
        self.oldest: dict[int, dict[str, Pending]] = {}
        """The collective of each group in which a rank waits."""
        self._begun: dict[int, dict[Node, Pending]] = {}
        """The oldest work of a rank that is not over, by the node that it waits for."""
        self._comparisons = 0
        for group in self.groups.values():
            mismatch = find_mismatch(group.records, texts)
            if mismatch is not None and not mismatch.is_clear:
                mismatch = settled(mismatch, self.next_calls(group, mismatch.sequence), texts)
            group.mismatch = mismatch
        self._passed_ns = self._passed()
        """For ranks that do not see their own work end, when they began the last that has."""
        for key, group in self.groups.items():
            for rank, record in group.records.items():
                self._add_waits(key, rank, record)
        for meeting in self.last_to_come:
            self.edges[meeting] = set(self._held_up_by(meeting))
        self.waiters = self._backwards()
        """The nodes that wait for a node: the edges backwards."""
        self.unexplained = self.ends()
        """The ends as they are if streams are independent."""
        for node in {node for end in self.unexplained for node in end}:
            if not isinstance(node, int):
                self.edges[node] |= self._begun_before(node)
        self.waiters = self._backwards()

    def next_calls(self, group: Group, sequence: int) -> Counter[int]:
        """The digests of the calls at a number in groups like this one; none after many of them."""
        self._comparisons += 1
        if self._comparisons > _COMPARISONS_MOST:
            return Counter()
        others = ((len(it.everybody()), it.records) for it in self.groups.values())
        return next_calls(group.records, sequence, others, len(group.everybody()))

    def _backwards(self) -> dict[Node, list[Node]]:
        waiters: dict[Node, list[Node]] = {}
        for node, targets in self.edges.items():
            for target in targets:
                waiters.setdefault(target, []).append(node)
        return waiters

    def ends(self) -> list[list[Node]]:
        """The components that wait for nothing outside of themselves, and are waited for."""
        return [
            sorted(component, key=str)
            for component in closing_components(self.edges)
            if any(node in self.waiters for node in component)
        ]

    def open_circles(self) -> list[list[Node]]:
        """The circles of waits that wait for others, too: no circle ends when these come."""
        ends = self.ends()
        circles = (sorted(strong, key=str) for strong in components(self.edges) if len(strong) > 1)
        return [circle for circle in circles if circle not in ends]

    def _begun_before(self, meeting: Meeting) -> set[Node]:
        """The oldest work, not over, that each rank in a meeting has begun before it."""
        group = self.groups.get(meeting[0])
        if group is not None and group.differs_by(meeting[1]):
            return set()
        older: set[Node] = set()
        for rank in self.waiters.get(meeting, ()):
            if isinstance(rank, int) and self._begun[rank][meeting].state != "started":
                begun = {node: work.created_ns for node, work in self._begun[rank].items()}
                first = min(begun, key=lambda node: (begun[node], str(node)))
                if begun[first] < begun[meeting]:
                    older.add(first)
        return older

    def waiting_for(self, nodes: Iterable[Node]) -> tuple[int, ...]:
        """The ranks that wait for any of these nodes, without these themselves."""
        start = set(nodes)
        return tuple(
            sorted(node for node in self.leading_to(start) - start if isinstance(node, int))
        )

    def leading_to(self, nodes: Collection[Node]) -> set[Node]:
        """These nodes, and all that wait for them, directly or through others."""
        seen, todo = set(nodes), list(nodes)
        while todo:
            fresh = [waiter for waiter in self.waiters.get(todo.pop(), ()) if waiter not in seen]
            seen.update(fresh)
            todo.extend(fresh)
        return seen

    def _passed(self) -> dict[int, int]:
        passed: dict[int, int] = {}
        for group in self.groups.values():
            over = max((record.completed for record in group.records.values()), default=0)
            for rank, record in group.records.items():
                for call in record.pending:
                    if call.peer is None and call.sequence <= over and _needs_all(call):
                        passed[rank] = max(passed.get(rank, 0), call.created_ns)
        return passed

    def _add_waits(self, key: str, rank: int, record: GroupRecord) -> None:
        oldest = oldest_wait(record)
        passed_ns = self._passed_ns.get(rank, 0)
        if oldest is not None and 0 < oldest.created_ns < passed_ns:
            group = self.groups[key]
            if not any(other.completed >= oldest.sequence for other in group.records.values()):
                oldest = None  # over, too; its other ranks have dumps of what is not over alone
        if oldest is not None:
            self.oldest.setdefault(rank, {})[key] = oldest
            meeting = (key, oldest.sequence)
            last = self.last_to_come.get(meeting)
            if last is None or oldest.created_ns > last[1].created_ns:
                self.last_to_come[meeting] = (rank, oldest)
            self._add_wait(rank, meeting, oldest)
        for transfer in record.pending:
            if transfer.peer is not None and transfer.created_ns >= passed_ns:
                self._add_transfer(key, rank, transfer)

    def _add_transfer(self, key: str, rank: int, transfer: Pending) -> None:
        """A transfer waits for its peer, unless the peer has come to its other end."""
        group = self.groups[key]
        peer = group.place(transfer.peer or 0)
        if not self._has_come(group, rank, peer, transfer):
            self._add_wait(rank, peer, transfer)
            self.edges.setdefault(peer, set())
            self.transfers.setdefault(peer, []).append((rank, key, transfer))
            return
        sender, receiver = (rank, peer) if transfer.is_send else (peer, rank)
        meeting = (f"transfer from rank {sender} to rank {receiver} in {key}", transfer.sequence)
        self.last_to_come.setdefault(meeting, (rank, transfer))
        self._tensors.setdefault((meeting, rank), transfer.operation.partition(" of ")[2])
        self._add_wait(rank, meeting, transfer)

    def _add_wait(self, rank: int, node: Node, work: Pending) -> None:
        self.edges[rank].add(node)
        begun = self._begun.setdefault(rank, {})
        if node not in begun or work.created_ns < begun[node].created_ns:
            begun[node] = work

    def _has_come(self, group: Group, rank: int, peer: int, transfer: Pending) -> bool:
        record = group.records.get(peer)
        if record is None:
            return False
        if any(
            call.peer is not None
            and call.is_send != transfer.is_send
            and group.place(call.peer) == rank
            and call.created_ns >= self._passed_ns.get(peer, 0)
            for call in record.pending
        ):
            return True
        if self.ranks[rank].lost or self.ranks[peer].lost:
            return False  # the rings do not hold all transfers: they cannot be counted
        own = group.records[rank]
        begun = dict(own.sends if transfer.is_send else own.receives).get(transfer.peer or 0, 0)
        ends = record.receives if transfer.is_send else record.sends
        return begun <= sum(count for place, count in ends if group.place(place) == rank)

    def _held_up_by(self, meeting: Meeting) -> Iterable[Node]:
        group = self.groups.get(meeting[0])
        if group is None:
            return  # a transfer that both have begun
        if group.differs_by(meeting[1]):
            return  # the mismatch explains it: later calls differ because of it
        # No rank is alone in a group: if no dump lists its ranks, any missing rank may be in it.
        members = (
            self.ranks
            if self.is_guessed(group.key) and len(group.records) == 1
            else group.everybody()
        )
        yield from (r for r in members if not group.has_joined(r, meeting[1]))
        for rank in group.records:
            yield from self._older_work(group, rank, meeting[1])

    def _older_work(self, group: Group, rank: int, sequence: int) -> Iterable[Node]:
        """The work that the device of a rank must end before it can start this."""
        record = group.records[rank]
        oldest = oldest_wait(record)
        if oldest is not None and oldest.sequence < sequence <= record.enqueued:
            yield (group.key, oldest.sequence)
        if oldest is None or oldest.sequence != sequence or rank not in group.late(sequence):
            return
        for key, elsewhere in self.oldest[rank].items():
            if key != group.key and elsewhere.created_ns < oldest.created_ns:
                yield (key, elsewhere.sequence)

    def tensors(self, transfer: Meeting, rank: int) -> str:
        """The tensors with which a rank takes part in a transfer."""
        return self._tensors.get((transfer, rank), "")

    def is_guessed(self, key: str) -> bool:
        """Whether no dump lists the ranks of a group."""
        group = self.groups.get(key)
        return group is not None and not group.members


def _needs_all(call: Pending) -> bool:
    """Whether a collective ends nowhere before each rank has taken part."""
    return call.operation.startswith(("all", "reduce_scatter", "barrier"))


def oldest_wait(record: GroupRecord) -> Pending | None:
    """The oldest collective that a rank has begun in a group, and that is not over."""
    listed = [call for call in record.pending if call.peer is None]
    if listed:
        return min(listed, key=lambda call: call.sequence)
    if 0 <= record.completed < record.enqueued and record.has_status:
        return Pending(  # the ring has lost it, or has only what is active
            sequence=record.completed + 1,
            operation="a collective that the ring has lost",
            state="scheduled",
            created_ns=0,
        )
    return None


def _groups(ranks: Mapping[int, RankSummary], world: int) -> dict[str, Group]:
    whole = array("I", range(world)).tobytes()
    by_place: dict[tuple[str, str, bytes], dict[int, GroupRecord]] = {}
    for rank, summary in ranks.items():
        for record in summary.groups:
            listed = record.members or (whole if record.description == "default_pg" else b"")
            place = (record.name, record.description, listed)
            by_place.setdefault(place, {})[rank] = record
    names = Counter(_name(name, description) for name, description, _ in by_place)
    groups: dict[str, Group] = {}
    for (name, description, packed), records in by_place.items():
        members = tuple(array("I", packed))
        key = _name(name, description)
        if names[key] > 1:  # groups that were split share a name: their ranks tell them apart
            key = f"{key} ({name}) of {named(members or records)}"
        groups.setdefault(key, Group(key, members)).records.update(records)
    for group in groups.values():
        if any(record.sends or record.receives for record in group.records.values()):
            # A status counts transfers, too: alone it does not tell which collectives are over.
            group.records = {r: record for r, record in group.records.items() if record.has_calls}
    return groups


def _name(name: str, description: str) -> str:
    return description if description not in {"", "undefined"} else f"group {name}"
