"""Which ranks of a circle of waits are to blame. Pure.

In a circle, ranks wait for each other in several meetings. A rank's calls differ from the others'
if its peer in a transfer is as far from it as no other rank's; else if no circle is left without
that rank alone; else if it is in a call that all others made after one that it left out; else if it
alone is in a call that no group like its own makes; else if it is at a place of the script where no
other of its groups is; else if it is on the smallest side.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

from everstep_services.attribution.flight_recorder.graph import components
from everstep_services.attribution.flight_recorder.siblings import call_at
from everstep_services.attribution.flight_recorder.waits import Meeting, Node, WaitGraph

_MOST_TRIED = 64
_MOST_ORDERED = 8


_NEEDED = 0.95
ODD = 0.85
_APART = 0.75
_ALIKE = 0.6
_HIDDEN = 0.4
"""How certain a circle is that has one rank: the order of others' work closes it."""


def odd_ranks(
    graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]
) -> tuple[Sequence[int], float]:
    """The ranks whose calls differ from the others', and how certain that is.

    All ranks of the circle if none do.
    """
    strange = _with_strange_peer(graph, ranks)
    if len(strange) == 1:
        return strange, ODD
    if len(ranks) < 2:
        hidden = [*ranks, *_ahead_of(graph, ranks, meetings)]
        odd = _with_own_transfers(graph, hidden)
        return (odd, _APART) if odd else (hidden, _ALIKE if len(hidden) > 1 else _HIDDEN)
    needed = _without_whom(graph, ranks, meetings)
    if needed:
        return needed, _NEEDED
    few = _out_of_order(graph, ranks, meetings) or _with_own_call(graph, ranks, meetings)
    if not few and (apart := _at_own_place(graph, ranks)):
        return apart, _APART
    few = few or _fewest(graph, ranks, meetings)
    return few, ODD if len(few) < len(ranks) else _ALIKE


def without_followers(
    graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]
) -> Sequence[int]:
    """The ranks of a circle but for those that only wait for a peer, and hold up nobody alone."""
    left = {*ranks}
    while len(left) > 2:
        held = {peer for rank in left for peer in graph.edges[rank]}
        awaited = [graph.edges[meeting] & left for meeting in meetings]
        held.update(*(few for few in awaited if len(few) == 1))
        free = (rank for rank in sorted(left - held) if _waits_in_transfers(graph, rank))
        follower = next(free, None)
        if follower is None:
            break
        left.discard(follower)
    return sorted(left)


def _waits_in_transfers(graph: WaitGraph, rank: int) -> bool:
    return all(isinstance(node, int) for node in graph.edges[rank])


def _with_strange_peer(graph: WaitGraph, ranks: Sequence[int]) -> Sequence[int]:
    """The ranks whose peer is as far from them as that of no other transfer."""
    far = Counter(
        abs(group.place(peer) - rank)
        for group in graph.groups.values()
        for rank, record in group.records.items()
        for peer, count in (*record.sends, *record.receives)
        for _ in range(min(count, 2))
    )
    if max(far.values(), default=0) < 2:
        return []  # no distance is usual
    pairs = ((waiter, peer) for peer in ranks for waiter in graph.waiters.get(peer, ()))
    return sorted(
        {rank for rank, peer in pairs if isinstance(rank, int) and far[abs(peer - rank)] == 1}
    )


def _ahead_of(graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]) -> list[int]:
    """The ranks that are in the meetings of a circle behind a transfer with one of its ranks."""
    waiters = {waiter for rank in ranks for waiter in graph.waiters.get(rank, ())}
    return sorted(
        waiter
        for waiter in waiters.difference(ranks)
        if isinstance(waiter, int) and not graph.edges[waiter].isdisjoint(meetings)
    )


def _with_own_transfers(graph: WaitGraph, ranks: Sequence[int]) -> Sequence[int]:
    """The one of several ranks whose transfers are unlike those of all others of its groups."""
    own = [
        rank
        for rank in ranks
        if _transfers(graph, rank)
        not in [_transfers(graph, peer) for peer in _groups_of(graph, rank) - {rank}]
    ]
    return own if len(own) == 1 < len(ranks) else ()


def _transfers(graph: WaitGraph, rank: int) -> set[tuple[bool, int, str]]:
    """The transfers of a rank that are not over: their sides, distances and tensors."""
    return {
        (call.is_send, group.place(call.peer) - rank, call.operation.partition(" of ")[2])
        for group in graph.groups.values()
        if rank in group.records
        for call in group.records[rank].pending
        if call.peer is not None
    }


def _without_whom(
    graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]
) -> Sequence[int]:
    """The only rank without which no circle would be left; none if there are several."""
    inside: set[Node] = {*ranks, *meetings}
    awaited = [graph.edges[meeting] & inside for meeting in meetings]
    awaited += [{peer} for rank in ranks for peer in graph.edges[rank] if peer in {*ranks}]
    single = sorted({rank for few in awaited if len(few) == 1 for rank in few}, key=str)
    if len(single) > _MOST_TRIED:
        return ()
    needed = [node for node in single if not _has_circle(graph, inside - {node})]
    return [node for node in needed if isinstance(node, int)] if len(needed) == 1 else ()


def _has_circle(graph: WaitGraph, nodes: set[Node]) -> bool:
    edges = {node: graph.edges[node] & nodes for node in nodes}
    return any(len(component) > 1 for component in components(edges))


def _out_of_order(
    graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]
) -> Sequence[int]:
    """The ranks that wait in a call without the one that all other ranks made before it."""
    if len(meetings) > _MOST_ORDERED:
        return ()
    odd = {
        rank
        for first, second in permutations(meetings, 2)
        if _is_first(graph, first, second)
        for rank in ranks
        if second in graph.edges[rank] and not _has_joined(graph, rank, first)
    }
    return sorted(odd) if len(odd) < len(ranks) else ()


def _with_own_call(
    graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]
) -> Sequence[int]:
    """The rank that is alone in a call, as no group like its own makes it, away from most ranks."""
    crowds = [{rank for rank in graph.ranks if it in graph.edges[rank]} for it in meetings]
    crowd = max((it for it in crowds if not it.issuperset(ranks)), key=len, default=set())
    if 2 * len(crowd) <= len(graph.ranks):
        return ()
    odd: set[int] = set()
    for key, sequence in meetings:
        group = graph.groups.get(key)
        if group is None or group.differs_by(sequence):
            continue
        came = {rank for rank in group.records if group.has_joined(rank, sequence)}
        calls = graph.next_calls(group, sequence)
        is_own = len(came) == 1 and not calls[call_at(group.records, sequence)]
        if is_own and crowd.issuperset({*group.everybody()} - came):
            odd |= came - crowd
    few = sorted(odd.intersection(ranks))
    return few if len(few) == 1 else ()


def _is_first(graph: WaitGraph, first: Meeting, second: Meeting) -> bool:
    """Whether the ranks that came to both came to `first` before; not if none came to both."""
    orders = {
        _came_first(graph, rank, first, second)
        for rank in graph.ranks
        if _has_joined(graph, rank, first) and _has_joined(graph, rank, second)
    }
    return orders - {None} == {True}


def _came_first(graph: WaitGraph, rank: int, first: Meeting, second: Meeting) -> bool | None:
    """Whether a rank that came to both came to `first` before; None if its dump leaves it open."""
    waits = graph.oldest.get(rank, {})
    own = [
        call
        for group, sequence in (first, second)
        if (call := waits.get(group)) is not None and call.sequence == sequence
    ]
    if len(own) == 1:  # the other one is over
        return second in graph.edges[rank]
    return own[0].created_ns < own[1].created_ns if own else None


def _has_joined(graph: WaitGraph, rank: int, meeting: Meeting) -> bool:
    group = graph.groups.get(meeting[0])
    return group is not None and group.has_joined(rank, meeting[1])


def _at_own_place(graph: WaitGraph, ranks: Sequence[int]) -> Sequence[int]:
    """The ranks of a circle whose stacks are at a place where no other's of their groups is."""
    where = {rank: summary.where for rank, summary in graph.ranks.items()}
    if not all(where[rank] for rank in ranks):
        return ()
    own = [
        rank
        for rank in ranks
        if not any(where[rank] == where[peer] for peer in _groups_of(graph, rank) - {rank})
    ]
    return own if len(own) < len(ranks) else ()


def _groups_of(graph: WaitGraph, rank: int) -> set[int]:
    """The ranks of its groups, but for those of all ranks."""
    groups = [group.records for group in graph.groups.values() if rank in group.records]
    few = [set(records) for records in groups if len(records) < len(graph.ranks)]
    return set().union(*few) if few else set(graph.ranks)


def _fewest(graph: WaitGraph, ranks: Sequence[int], meetings: Sequence[Meeting]) -> Sequence[int]:
    """The ranks of a circle on its smallest side; all, if no side is smaller."""
    sides = [[rank for rank in ranks if meeting in graph.edges[rank]] for meeting in meetings]
    sides = sorted((side for side in sides if side), key=len)
    is_smaller = len(sides) > 1 and len(sides[0]) < len(sides[1])
    return sides[0] if is_smaller else ranks
