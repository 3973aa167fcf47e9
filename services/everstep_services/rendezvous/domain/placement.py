"""Which node gets which slot: holders keep theirs, and as few others as possible move."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, lcm
from typing import NamedTuple

FIRST_PORT, PORTS = 20_000, 12_000
"""Below the kernel's range for outgoing connections: ports at which nodes meet."""
_DIGITS = re.compile(r"(\d+)")


class Candidate(NamedTuple):
    """A node that may get a slot."""

    node: str
    infra_rank: int | None = None
    failure_domain: str = ""
    network: str = ""
    """Its network domain or replacement group; all nodes of a segment are in the same one."""
    slot: int | None = None
    """The slot that it holds."""
    is_suspect: bool = False
    """Whether health suspects it: it gets a slot only where no other node can have it."""
    is_doubted: bool = False
    """Whether its network is slow or was not measured: likewise, but a suspect comes after it."""

    @property
    def order(self) -> tuple[object, ...]:
        """Sorts by the scheduler's order, else by domain, then by name in natural order."""
        if self.infra_rank is not None:  # no other node has it
            return (self.infra_rank,)
        return (inf, _natural(self.failure_domain or self.network), _natural(self.node))


@dataclass(frozen=True, slots=True)
class World:
    """The numbers of slots that a round may have."""

    least: int
    most: int
    unit: int = 1
    segment: int = 1
    within: str = "network domain"
    """What the slots of a segment have in common."""

    def sizes(self) -> Iterator[int]:
        """Yield each allowed size, the largest first."""
        step = lcm(self.unit, self.segment)
        if self.least == self.most:
            yield self.most
            return
        largest = self.most - self.most % step
        yield from range(largest, self.least - 1, -step)


def largest_size(candidates: Sequence[Candidate], world: World) -> int:
    """Return the size of the largest world that these nodes can form; 0 for none."""
    room = _room(candidates, world.segment)
    return next((size for size in world.sizes() if size <= room), 0)


def obstacle(candidates: Sequence[Candidate], world: World) -> str:
    """Explain why the largest world cannot form; empty when only nodes are missing."""
    needed = min(world.sizes(), default=world.least)
    if world.segment == 1 or len(candidates) < needed:
        return ""
    return (
        f"{len(candidates)} nodes are here, but each segment of {world.segment} slots must be "
        f"within one {world.within}, which only {_room(candidates, world.segment)} of them can fill"
    )


def assign(
    candidates: Sequence[Candidate],
    size: int,
    segment: int,
    lost_domains: dict[int, str],
) -> dict[int, str]:
    """Map each slot to a node, for a size that `largest_size` allows.

    `lost_domains` has the failure domain of the last holder of an open slot: a node from that
    domain is preferred.
    """
    candidates = _without_suspects(candidates, size, segment)
    if segment > 1:
        return _by_segments(candidates, size, segment)
    placed, free = _holders(candidates, size)
    by_domain: dict[str, list[str]] = defaultdict(list)
    for candidate in free:
        by_domain[candidate.failure_domain].append(candidate.node)
    taken: set[str] = set()
    waiting = iter(free)
    for slot in range(size):
        if slot in placed:
            continue
        near = by_domain.get(lost_domains.get(slot, ""), []) if lost_domains.get(slot) else []
        node = next((node for node in near if node not in taken), None)
        if node is None:
            node = next(candidate.node for candidate in waiting if candidate.node not in taken)
        taken.add(node)
        placed[slot] = node
    return placed


def assign_elsewhere(
    candidates: Sequence[Candidate], size: int, segment: int, last: str | None
) -> dict[int, str]:
    """Map each slot to another node than the one that holds it, if there is another.

    Spares come first; `last` is left out where others are enough.
    """
    candidates = _without_suspects(candidates, size, segment)
    holding, free = _holders(candidates, size)
    if segment > 1:
        placed = _by_segments(candidates, size, segment)
        nodes = [placed[slot] for slot in range(size)]
    else:
        nodes = [candidate.node for candidate in free[:size]]
        stay = sorted(holding, key=lambda slot: (holding[slot] == last, slot))[: size - len(nodes)]
        nodes += [holding[slot] for slot in sorted(stay)]
    turned = [_turned(nodes, segment, by) for by in range(size)]
    # each holder is in its own slot in one of them: without segments, nobody is in another
    moved = min(
        turned, key=lambda nodes: sum(nodes[slot] == held for slot, held in holding.items())
    )
    return dict(enumerate(moved))


def _turned(nodes: list[str], segment: int, by: int) -> list[str]:
    """Move all nodes on by this many places: within their segments first, then with them."""
    inner, outer = by % segment, by - by % segment
    turned = nodes[-outer:] + nodes[:-outer]
    segments = [turned[first : first + segment] for first in range(0, len(turned), segment)]
    return [node for part in segments for node in part[-inner:] + part[:-inner]]


def _without_suspects(candidates: Sequence[Candidate], size: int, segment: int) -> list[Candidate]:
    """Leave out as many suspects as the size allows: spares first, then the last slots."""
    suspects = [candidate for candidate in candidates if candidate.is_suspect]
    doubted = [
        candidate for candidate in candidates if candidate.is_doubted and not candidate.is_suspect
    ]
    room = _room(candidates, segment)
    left = Counter(_network(candidate) for candidate in candidates)
    out: set[str] = set()
    for candidate in (*_last_first(suspects), *_last_first(doubted)):
        network = _network(candidate)
        cost = 0 if left[network] % segment else segment
        if room - cost >= size:
            room -= cost
            left[network] -= 1
            out.add(candidate.node)
    return [candidate for candidate in candidates if candidate.node not in out]


def _last_first(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield spares, then holders of slots, each from the last on."""
    held = {candidate.slot: candidate for candidate in candidates if candidate.slot is not None}
    spares = [candidate for candidate in candidates if candidate.slot is None]
    yield from sorted(spares, key=lambda spare: spare.order, reverse=True)
    yield from (held[slot] for slot in sorted(held, reverse=True))


def _holders(candidates: Iterable[Candidate], size: int) -> tuple[dict[int, str], list[Candidate]]:
    """Return the nodes that keep their slots, and the others, former holders first."""
    placed: dict[int, str] = {}
    moving: list[Candidate] = []
    spare: list[Candidate] = []
    for candidate in candidates:
        if candidate.slot is None:
            spare.append(candidate)
        elif candidate.slot < size:
            placed[candidate.slot] = candidate.node
        else:
            moving.append(candidate)
    moving.sort(key=lambda one: one.slot or 0)
    spare.sort(key=lambda one: one.order)
    return placed, moving + spare


def _by_segments(candidates: Sequence[Candidate], size: int, segment: int) -> dict[int, str]:
    networks = {candidate.node: _network(candidate) for candidate in candidates}
    holding, free = _holders(candidates, size)
    placed: dict[int, str] = {}
    open_segments: list[tuple[int, str]] = []
    pool: dict[str, list[str]] = defaultdict(list)
    for first in range(0, size, segment):
        held = {slot: holding[slot] for slot in range(first, first + segment) if slot in holding}
        here = {networks[node] for node in held.values()}
        if len(held) == segment and len(here) == 1:
            placed |= held
            continue
        open_segments.append((first, next(iter(here)) if len(here) == 1 else ""))
        for node in held.values():
            pool[networks[node]].append(node)
    for candidate in free:
        pool[networks[candidate.node]].append(candidate.node)
    # Segments that can keep their domain choose first: the others can use any domain.
    open_segments.sort(key=lambda it: (len(pool.get(it[1], ())) < segment, it[0]))
    slots_of = {node: slot for slot, node in holding.items()}
    for first, home in open_segments:
        where = home if len(pool.get(home, ())) >= segment else _roomiest(pool, segment)
        placed |= _fill(range(first, first + segment), pool[where], slots_of)
    return placed


def _fill(slots: range, pool: list[str], slots_of: dict[str, int]) -> dict[int, str]:
    """Fill a segment from one domain; nodes that held one of its slots keep it."""
    placed = {slots_of[node]: node for node in pool if slots_of.get(node, -1) in slots}
    for node in placed.values():
        pool.remove(node)
    for slot in slots:
        if slot not in placed:
            placed[slot] = pool.pop(0)
    return placed


def _roomiest(pool: dict[str, list[str]], segment: int) -> str:
    """Return the first domain, in the order of nodes, that has enough nodes for a segment."""
    return next(network for network, nodes in pool.items() if len(nodes) >= segment)


def _room(candidates: Sequence[Candidate], segment: int) -> int:
    if segment == 1:
        return len(candidates)
    by_network: dict[str, int] = defaultdict(int)
    for candidate in candidates:
        by_network[_network(candidate)] += 1
    return sum(count - count % segment for count in by_network.values())


def _network(candidate: Candidate) -> str:
    # A node that reports no domain shares none with any other node.
    return candidate.network or candidate.failure_domain or f"\0{candidate.node}"


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sort `node-9` before `node-10`."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in _DIGITS.split(name)
    )
