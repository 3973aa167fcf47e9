"""Finds the faults of a job, at the ends of its wait graph. Pure.

The dependencies of `waits.py` lead to something that waits for nothing: a rank outside of all
collectives, a rank without a dump, a collective in which ranks call different operations, a
collective that all have joined and that does not end, or a cycle. These are the faults; all other
ranks are victims.
A wait that is no longer than others in the same ring accuses nobody.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set

import msgspec

from everstep_services.attribution.flight_recorder.circles import ODD, odd_ranks, without_followers
from everstep_services.attribution.flight_recorder.merged_faults import merged
from everstep_services.attribution.flight_recorder.mismatches import Mismatch, by_own_past
from everstep_services.attribution.flight_recorder.ranges import named
from everstep_services.attribution.flight_recorder.report import (
    Fault,
    FlightReport,
    Kind,
    MeetingState,
    Presence,
    Suspect,
    Verdict,
)
from everstep_services.attribution.flight_recorder.stack_calls import unrecorded
from everstep_services.attribution.flight_recorder.summary import Pending, UnreadableDump
from everstep_services.attribution.flight_recorder.waits import Group, Meeting, Node, WaitGraph

_PATIENCE_NS = 5_000_000_000
"""How long a wait must last to count, where the rings do not show how long waits usually are."""
_LEAST_NS = 1_000_000_000
_UNUSUAL = 2
_BELIEVED = 0.5
_ALONE = 0.6
_MAY_FOLLOW = 0.5
"""The factor for ranks that others wait for, if there is a circle of waits."""
_MOST_MEETINGS = 64


class FaultFinder:
    """Finds faults at the ends of the wait graph."""

    def __init__(
        self,
        graph: WaitGraph,
        world: int,
        unreadable: Mapping[int, UnreadableDump],
        ended: Set[int] = frozenset(),
    ) -> None:
        self._graph = graph
        self._unreadable = unreadable
        self._ended = ended
        self._partial = sorted(r for r, summary in graph.ranks.items() if summary.is_partial)
        self._world = world
        members = {m for group in graph.groups.values() for m in group.everybody()}
        self._missing = tuple(sorted(members - set(graph.ranks)))

    def report(self, notes: tuple[str, ...], *, sizes_differ: bool = False) -> FlightReport:
        """Return the faults, and the rank that each collective waits for."""
        ends = self._graph.ends()
        still = [end for end in ends if not self._is_moving(end)]
        circles = [*self._clear_circles()]
        seen = [fault for end in _together(still) for fault in self._faults(end)]
        if circles:  # those whom a circle waits for may wait in it by calls that no dump has
            seen = [
                msgspec.structs.replace(fault, confidence=_MAY_FOLLOW * fault.confidence)
                if fault.kind == "never_joined"
                else fault
                for fault in seen
            ]
        seen += circles
        if sizes_differ:
            moving = [end for end in ends if self._is_moving(end)]
            young = (fault for end in _together(moving) for fault in self._faults(end))
            seen += [fault for fault in young if fault.kind == "mismatch"]
            if not any(fault.kind == "mismatch" for fault in seen):
                seen += self._torn()
        faults = merged(seen)
        return FlightReport(
            verdict=self._verdict(faults),
            summary=self._summary(faults),
            ranks=self._world,
            dumps=len(self._graph.ranks),
            faults=tuple(faults),
            meetings=tuple(self._meetings()),
            without_dump=self._missing,
            notes=(*notes, *self._guesses()),
        )

    def _torn(self) -> Sequence[Fault]:
        """The only call with tensors of other sizes, although its end has torn it for all ranks."""
        faults = []
        for group in self._graph.groups.values():
            if group.mismatch is not None:
                mismatch = by_own_past(group.mismatch, group.records)
                if mismatch.is_clear and {kind for kind, _ in mismatch.odd.values()} == {"size"}:
                    faults.append(self._mismatch(group.key, mismatch))
        return faults if len(faults) == 1 else ()

    def _clear_circles(self) -> Iterable[Fault]:
        """Circles that wait for others, too, and in which some ranks differ from the rest."""
        for circle in self._graph.open_circles():
            ranks = [node for node in circle if isinstance(node, int)]
            fault = self._cycle(ranks, [node for node in circle if not isinstance(node, int)])
            if fault.confidence >= ODD and not self._is_moving(circle):
                yield fault

    def _verdict(self, faults: Sequence[Fault]) -> Verdict:
        if not self._graph.last_to_come and not faults and not (self._partial or self._unreadable):
            return "nothing_pending"
        return "culprits" if faults and faults[0].confidence >= _BELIEVED else "inconclusive"

    def _summary(self, faults: Sequence[Fault]) -> str:
        if faults and faults[0].confidence >= _BELIEVED:
            more = sum(fault.confidence >= _BELIEVED for fault in faults) - 1
            return faults[0].summary + (f"; and {more} more" if more else "")
        if faults:
            return f"inconclusive: {faults[0].summary}"
        if self._graph.last_to_come:
            return (
                "inconclusive: no wait is longer than usual; the job was making progress when "
                "the dumps were written"
            )
        without = [f"{named(sorted(self._unreadable))} left no readable dump"]
        torn = [f"the dumps of {named(self._partial)} cannot be read to their end"]
        reasons = without * bool(self._unreadable) + torn * bool(self._partial)
        if reasons:
            reason = ", and ".join(reasons)
            return f"inconclusive: no rank waits in a collective, but {reason}"
        return "no rank waits in a collective"

    def _guesses(self) -> Iterable[str]:
        guessed = sorted(group.key for group in self._graph.groups.values() if not group.members)
        if guessed:
            yield (
                f"no dump lists the ranks of {', '.join(guessed[:8])}: ranks that never called "
                f"anything there are not missed"
            )

    def _faults(self, end: Sequence[Node]) -> Iterable[Fault]:
        ranks = sorted(node for node in end if isinstance(node, int))
        meetings = [node for node in end if not isinstance(node, int)]
        if not meetings and not self._graph.edges.get(ranks[0], set()) & set(ranks):
            yield from self._absent(ranks)
        elif ranks:
            yield self._cycle(ranks, meetings)
        else:
            yield from (self._at_meeting(meeting) for meeting in meetings)

    def _absent(self, ranks: Sequence[int]) -> Iterable[Fault]:
        """Ranks for which others wait, and that wait for nobody."""
        silent = [rank for rank in ranks if rank not in self._graph.ranks]
        present = [rank for rank in ranks if rank in self._graph.ranks]
        alone = self._alone(present)
        if ended := [rank for rank in present if rank in self._ended]:
            yield self._fault(  # the others had no time to come
                "never_joined",
                f"{named(ended)} had ended while others waited in {self._awaited(ended)}",
                0.95 * self._certainty(ended),
                [(rank, self._last_seen(rank)) for rank in ended],
            )
        elif alone:
            yield self._fault(
                "never_joined",
                f"{named(alone)} alone entered {self._awaited(present)}, and {named(present)} "
                f"never joined it: it calls what the others do not, or they are stuck elsewhere",
                _ALONE * self._certainty(present),
                [(rank, "is alone in a collective that all others leave out") for rank in alone]
                + [(rank, self._last_seen(rank)) for rank in present],
            )
        elif present:
            waits = "waits for nobody: it is" if len(present) == 1 else "wait for nobody: they are"
            yield self._fault(
                "never_joined",
                f"{named(present)} never joined {self._awaited(present)}, and {waits} busy, stuck "
                f"or gone outside of any collective",
                (0.95 if not silent else 0.85) * self._certainty(present),
                [(rank, self._last_seen(rank)) for rank in present],
            )
        if silent:
            is_evidence = not present and all(self._is_evidence(rank) for rank in silent)
            has_files = all(rank in self._unreadable for rank in silent)
            yield self._fault(
                "no_dump",
                f"{named(silent)} left no {'readable ' * has_files}dump, and others wait for "
                f"{'it' if len(silent) == 1 else 'them'} in {self._awaited(silent)}",
                0.85 if is_evidence else 0.4,
                [(rank, self._without_dump(rank)) for rank in silent],
            )

    def _alone(self, absent: Sequence[int]) -> list[int]:
        """The rank that waits for these; none if others wait for them, or it waits for one only."""
        joined: set[int] = set()
        left_out: set[int] = set()
        for key, sequence in self._awaited_at(absent):
            group = self._graph.groups[key]
            joined |= {rank for rank in group.records if group.has_joined(rank, sequence)}
            left_out |= set(group.everybody()) - joined
        is_alone = len(joined) == 1 and len(left_out) > 1 and left_out <= set(absent)
        return sorted(joined) if is_alone else []

    def _without_dump(self, rank: int) -> str:
        if rank in self._unreadable:
            return f"it left no readable dump: {self._unreadable[rank].reason}"
        return "there is no dump of it: it died, or could not write one"

    def _is_evidence(self, rank: int) -> bool:
        return rank not in self._unreadable or self._unreadable[rank].is_evidence

    def _certainty(self, ranks: Sequence[int]) -> float:
        """A factor below 1 if it is only guessed that these ranks belong to the group."""
        awaited = self._awaited_at(ranks)
        return (
            0.6
            if awaited and all(self._graph.is_guessed(meeting[0]) for meeting in awaited)
            else 1.0
        )

    def _awaited_at(self, ranks: Sequence[int]) -> list[Meeting]:
        groups = self._graph.groups
        waiters = {(node, rank) for rank in ranks for node in self._graph.waiters.get(rank, ())}
        awaited = {
            node
            for node, rank in waiters
            if isinstance(node, tuple)
            and node[0] in groups
            and not groups[node[0]].has_joined(rank, node[1])
        }
        return sorted(
            awaited, key=lambda node: (self._graph.last_to_come[node][1].created_ns, node)
        )

    def _awaited(self, ranks: Sequence[int]) -> str:
        meetings = self._awaited_at(ranks)
        if not meetings:
            return "a transfer"
        first = meetings[0]
        more = f" and {len(meetings) - 1} more" if len(meetings) > 1 else ""
        return (
            f"{self._graph.last_to_come[first][1].operation}, number {first[1]} of {first[0]}{more}"
        )

    def _last_seen(self, rank: int) -> str:
        groups = self._graph.groups.values()
        done = max(
            (
                (group.records[rank].enqueued, group.key)
                for group in groups
                if rank in group.records
            ),
            default=None,
        )
        if done is None:
            return "its dump has no collective at all"
        return f"the last that it entered is number {done[0]} of {done[1]}"

    def _cycle(self, ranks: Sequence[int], meetings: Sequence[Meeting]) -> Fault:
        keys = sorted({key for key, _ in meetings}) or ["transfers"]
        for group in (self._graph.groups[key] for key in keys if key in self._graph.groups):
            if group.mismatch is not None and group.mismatch.is_clear:
                return self._mismatch(group.key, group.mismatch)
        few, certainty = odd_ranks(self._graph, ranks, meetings)
        if len(few) == len(ranks):
            few = ranks = without_followers(self._graph, ranks, meetings)
        ranks = sorted({*ranks, *few})
        differ = f"; {named(few)} differ{'s' * (len(few) == 1)} from the others"
        odd = "" if len(few) == len(ranks) else differ
        return self._fault(
            "cycle",
            f"{named(ranks)} wait for each other in {' and '.join(keys[:4])}: they do not make the "
            f"calls of these groups in the same order, or one is left out{odd}",
            certainty,
            [(rank, f"waits in {self._waits_in(rank, keys)}") for rank in few],
        )

    def _waits_in(self, rank: int, keys: Sequence[str]) -> str:
        waits = [node for node in self._graph.edges[rank] if not isinstance(node, int)]
        places = [f"number {meeting[1]} of {meeting[0]}" for meeting in waits if meeting[0] in keys]
        peers = [named([peer]) for peer in self._graph.edges[rank] if isinstance(peer, int)]
        return " and ".join([*places, *(f"a transfer with {peer}" for peer in peers)])

    def _at_meeting(self, meeting: Meeting) -> Fault:
        group = self._graph.groups.get(meeting[0])
        if group is None:
            return self._transfer(meeting)
        if group.mismatch is not None and group.mismatch.sequence <= meeting[1]:
            return self._mismatch(group.key, group.mismatch)
        roots = self._roots(group, meeting[1])
        if len(set(roots.values())) > 1:
            return self._other_roots(meeting, roots)
        states = self._states(meeting)
        call = self._graph.last_to_come[meeting][1].operation
        here = f"{call}, number {meeting[1]} of {group.key}"
        late = [rank for rank in states.get("scheduled", ()) if rank in group.late(meeting[1])]
        if late:
            return self._fault(
                "not_started",
                f"{named(late)} joined {here}, but "
                f"{'its device has' if len(late) == 1 else 'their devices have'} not started it",
                0.7,
                [
                    (rank, "its device is busy with something else, or does not run")
                    for rank in late
                ],
            )
        unfinished = [*states.get("started", ()), *states.get("scheduled", ())]
        if states.get("completed") and len(unfinished) < len(group.everybody()):
            return self._fault(
                "half_completed",
                f"{here} is over on {named(states['completed'])}, and not on {named(unfinished)}",
                0.6,
                [(rank, "others have ended what it still waits for") for rank in unfinished],
            )
        return self._fault(
            "stuck",
            f"all {len(unfinished)} ranks joined {here}, and it does not end: the network, a "
            f"device or the library{unrecorded(call)}; the dumps do not tell which"
            if len(unfinished) > 1
            else f"{named(unfinished)} is alone in {here}, and it does not end: its device",
            0.3 if len(unfinished) > 1 else _ALONE,
            [(rank, "joined") for rank in unfinished],
        )

    def _roots(self, group: Group, sequence: int) -> dict[int, int]:
        return {
            rank: call.root
            for rank, record in group.records.items()
            for call in record.pending
            if call.sequence == sequence and call.root is not None
        }

    def _other_roots(self, meeting: Meeting, roots: Mapping[int, int]) -> Fault:
        (usual, most), (_, next_most), *_ = Counter(roots.values()).most_common()
        is_clear = most > next_most
        group = self._graph.groups[meeting[0]]
        # as many ranks for one as for the other: the group's first is the usual root, and a root of
        # its own the common mistake
        own = {group.place(root) for root in roots.values() if root}
        alone = [rank for rank, root in roots.items() if root and group.place(root) == rank]
        is_alone = not is_clear and len(alone) == 1 and {*alone} == roots.keys() & own
        at_odds = (rank for rank, root in roots.items() if not is_clear or root != usual)
        odd = alone if is_alone else sorted(at_odds)
        sides = {root: [rank for rank in roots if roots[rank] == root] for root in roots.values()}
        told = "; ".join(f"{named(sides[at])}: rank {group.place(at)}" for at in sorted(sides))
        return self._fault(
            "mismatch",
            f"the ranks disagree about the root of "
            f"{self._graph.last_to_come[meeting][1].operation}, number {meeting[1]} of "
            f"{group.key}: {told}",
            0.9 if is_clear else 0.75 if is_alone else 0.6,
            [(rank, f"its root is rank {group.place(roots[rank])}") for rank in odd],
        )

    def _transfer(self, meeting: Meeting) -> Fault:
        ranks = sorted(it for it in self._graph.waiters.get(meeting, ()) if isinstance(it, int))
        tensors = {rank: self._graph.tensors(meeting, rank) for rank in ranks}
        if len(set(tensors.values())) > 1:
            return self._fault(
                "mismatch",
                f"the ends of the {meeting[0]} do not agree: "
                f"{' against '.join(tensors[rank] for rank in ranks)}",
                0.6,
                [(rank, f"its end has {tensors[rank]}") for rank in ranks],
            )
        return self._fault(
            "stuck",
            f"both ends of the {meeting[0]} wait: the link between {named(ranks)}, or a device",
            0.5,
            [(rank, "one end of the transfer") for rank in ranks],
        )

    def _mismatch(self, key: str, mismatch: Mismatch) -> Fault:
        difference, call = min(mismatch.odd.items())[1]
        did = {
            "skipped": "skipped a call that the others make",
            "extra": "makes a call that the others do not",
            "order": "makes two calls in another order",
            "operation": "calls another operation",
            "size": "has tensors of another size",
            "dtype": "has tensors of another type",
        }[difference]
        suspects = [
            (rank, f"{kind}: calls {text}, where most call {mismatch.majority}")
            for rank, (kind, text) in sorted(mismatch.odd.items())
        ]
        summary = (
            f"{named(mismatch.odd)} {did} at number {mismatch.sequence} of {key}: {call} instead "
            f"of {mismatch.majority}"
        )
        if not mismatch.is_clear:
            others = [rank for rank in self._graph.groups[key].records if rank not in mismatch.odd]
            suspects += [(rank, f"calls {mismatch.majority}") for rank in others]
            summary = (
                f"{named(rank for rank, _ in suspects)} do not agree at number {mismatch.sequence} "
                f"of {key}: {call} against {mismatch.majority}"
            )
        alike = f", as {mismatch.alike} groups like it do there" if mismatch.alike else ""
        alike = (
            ", which the others have called before, and it has not" if mismatch.is_new else alike
        )
        certainty = ODD if mismatch.alike else 0.95 if mismatch.is_clear else 0.6
        return self._fault("mismatch", summary + alike, certainty, suspects)

    def _fault(
        self, kind: Kind, summary: str, confidence: float, suspects: Sequence[tuple[int, str]]
    ) -> Fault:
        ranks = [rank for rank, _ in suspects]
        waiting = set(self._graph.waiting_for(self._nodes_of(ranks))) - set(ranks)
        return Fault(
            kind=kind,
            summary=summary,
            confidence=confidence,
            suspects=tuple(Suspect(rank=rank, reason=reason) for rank, reason in suspects),
            waiting=tuple(sorted(waiting)),
        )

    def _nodes_of(self, ranks: Sequence[int]) -> set[Node]:
        """These ranks, and the meetings in which they wait for each other."""
        nodes: set[Node] = set(ranks)
        for rank in ranks:
            nodes |= {node for node in self._graph.edges.get(rank, ()) if not isinstance(node, int)}
        return nodes

    def _states(self, meeting: Meeting) -> dict[Presence, tuple[int, ...]]:
        group = self._graph.groups.get(meeting[0])
        states: dict[Presence, list[int]] = {}
        if group is not None:
            for rank in group.everybody():
                has_dump = rank in self._graph.ranks
                state = group.presence(rank, meeting[1], has_dump=has_dump)
                states.setdefault(state, []).append(rank)
        return {state: tuple(ranks) for state, ranks in states.items()}

    def _meetings(self) -> Iterable[MeetingState]:
        ordered = sorted(self._graph.last_to_come.items(), key=lambda item: item[1][1].created_ns)
        for meeting, (_, pending) in ordered[:_MOST_MEETINGS]:
            age_ns = self._age_ns(meeting)
            yield MeetingState(
                group=meeting[0],
                sequence=meeting[1],
                operation=pending.operation,
                where=pending.where,
                age_s=None if age_ns is None else round(age_ns / 1e9, 3),
                ranks=self._states(meeting),
            )

    def _age_ns(self, meeting: Meeting) -> int | None:
        """How long ago the last rank came, by that rank's own clock."""
        return self._since_ns(*self._graph.last_to_come[meeting])

    def _since_ns(self, rank: int, pending: Pending) -> int | None:
        taken_ns = self._graph.ranks[rank].taken_ns
        return taken_ns - pending.created_ns if taken_ns and pending.created_ns else None

    def _is_moving(self, end: Sequence[Node]) -> bool:
        """Whether everything that waits for this end has only just begun to wait."""
        meetings = {node for node in end if not isinstance(node, int)}
        waiters = {waiter for node in end for waiter in self._graph.waiters.get(node, ())}
        meetings |= {waiter for waiter in waiters if not isinstance(waiter, int)}
        ages = [(meeting[0], self._age_ns(meeting)) for meeting in meetings]
        ages += [
            (key, self._since_ns(rank, transfer))
            for node in end
            if isinstance(node, int)
            for rank, key, transfer in self._graph.transfers.get(node, ())
        ]
        timed = [(key, age) for key, age in ages if age is not None]
        return bool(timed) and all(age < self._patience_ns(key) for key, age in timed)

    def _patience_ns(self, key: str) -> int:
        group = self._graph.groups.get(key)
        gaps = [record.longest_gap_ns for record in group.records.values()] if group else []
        usual = max(gaps, default=0)
        return max(_LEAST_NS, _UNUSUAL * usual) if usual else _PATIENCE_NS


def _together(ends: Sequence[Sequence[Node]]) -> Iterable[Sequence[Node]]:
    """Merge ends that are single ranks, so that all missing ranks are reported together."""
    alone = [end[0] for end in ends if len(end) == 1 and isinstance(end[0], int)]
    if alone:
        yield alone
    yield from (end for end in ends if not (len(end) == 1 and isinstance(end[0], int)))
