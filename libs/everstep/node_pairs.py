"""The pairs of a network test, and the slow nodes and links that its figures show. Pure."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

BELOW = 0.5
"""A pair below this share of the usual bandwidth is slow."""
_PARTNERS_LEAST = 2

Pair = tuple[str, str]


@dataclass(frozen=True, slots=True)
class MeasuredPair:
    """The speed between two nodes; 0 if they did not reach each other."""

    pair: Pair
    mib_s: float


@dataclass(frozen=True, slots=True)
class SlowNodes:
    """A node that is slow with everybody, or two nodes that are slow with each other only."""

    nodes: tuple[str, ...]
    """The node, or the two ends of a link."""
    mib_s: float
    """The median with all partners, or the figure of the pair."""
    usual_mib_s: float

    @property
    def reason(self) -> str:
        """The sentence for people, with the numbers."""
        who = "every partner" if len(self.nodes) == 1 else f"{self.nodes[1]} alone"
        return (
            f"{self.nodes[0]} reaches {self.mib_s:.0f} MiB/s with {who}, and "
            f"{self.usual_mib_s:.0f} MiB/s is usual here"
        )


def schedule(nodes: Sequence[str]) -> Iterator[list[Pair]]:
    """Every pair once, in as few turns as possible: within a turn no node is in two pairs.

    The first turns alone give each node as many partners, all different.

    A round-robin tournament: the first stays, the others move on by one place a turn. With an
    odd number one node rests in each turn.
    """
    places: list[str | None] = list(dict.fromkeys(nodes))
    if len(places) % 2:
        places.append(None)
    for _ in range(len(places) - 1):
        half = len(places) // 2
        faces = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(pair, other) for pair, other in faces if pair is not None and other is not None]
        places = [places[0], places[-1], *places[1:-1]]


def slow_ones(measured: Iterable[MeasuredPair], below: float = BELOW) -> list[SlowNodes]:
    """The slow ones. With fewer than two partners, a node and a link look the same.

    The usual bandwidth is the median of each node's best figure: a slow node spoils only one of
    these, but a large part of all pairs.
    """
    figures = list(measured)
    speeds: dict[str, list[float]] = {}
    for pair in figures:
        for node in pair.pair:
            speeds.setdefault(node, []).append(pair.mib_s)
    if not speeds:
        return []
    usual = statistics.median(max(reached) for reached in speeds.values())
    limit = below * usual
    nodes = {
        node: statistics.median(reached)
        for node, reached in speeds.items()
        if len(reached) >= _PARTNERS_LEAST and max(reached) < limit
    }
    links = [
        SlowNodes(figure.pair, figure.mib_s, usual)
        for figure in figures
        if figure.mib_s < limit and not nodes.keys() & set(figure.pair)
    ]
    return [*(SlowNodes((node,), speed, usual) for node, speed in sorted(nodes.items())), *links]
