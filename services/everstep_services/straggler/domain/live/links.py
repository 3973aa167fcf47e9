"""A slow link that slows the whole job: nobody's own time shows it, but its connections do."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.operations import Array

LINK_CONFIDENCE = 0.5
"""By what its connections tell, and not by its own time."""
LINK_WINDOWS = 3
"""So many make a link slow, or good again."""
_LEAST = 3
"""So many windows before tell what is usual."""
_KEPT = 30
_TIMES = 2.0
"""Above what is usual for a node its round trips are by so many times that."""
_TIMES_NEXT = 1.5
"""And by so many times as much as those of any other node: neighbours see a part of it."""
_TIMES_OTHERS = 4.0
"""And by so many times as much as those of the other nodes in the median."""
_PART_OF_FIRST = 0.5
"""In a ring, what the next node sends to a slow one is held up by so much of it at least."""
_LEAST_S = 0.002


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The connections of one node stand out, and steps are longer."""

    row: int
    """The node's first rank."""
    words: str
    lost_s: float
    """In a step."""
    step_s: float


@dataclass(slots=True)
class Links:
    """What nodes' connections do, from window to window."""

    steps: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Of windows in which steps were as long as usual."""
    trips: dict[str, deque[float]] = field(default_factory=dict)
    """Round trips by node, in these windows."""
    node: str = ""
    """The one that stands out."""
    above: int = 0
    """For how many windows it does; those that tell of nobody are left out."""
    below: int = 0
    slow: int = 0
    """For how many windows steps are longer."""
    known: dict[str, int] = field(default_factory=dict)
    """Nodes that were found, with the rank that each is reported under."""
    lost_s: float = 0.0
    """By how much a step was longer than usual, in the last window."""

    def observe(self, measured: Measured, ratio: float) -> tuple[SlowLink | None, list[int]]:
        """Take in a window. Returns what is found, and the ranks whose links are good again."""
        usual = float(np.median(self.steps)) if len(self.steps) >= _LEAST else float("nan")
        trips = _by_node(measured)
        self.lost_s = max(0.0, measured.step_s - usual) if np.isfinite(usual) else 0.0
        if not measured.step_s > (1 + ratio) * usual:
            self._learn(measured, trips)
            return None, self._good_again()
        self.slow += 1
        if self.slow > _KEPT and not self.known:
            self.steps.clear()  # steps are as long as this by now
        self.below = 0
        stands_out = self._worst(measured, trips)
        if stands_out is None:
            return None, []
        worst, following = stands_out
        node = measured.sample.nodes[worst].node
        self.above = self.above + 1 if node == self.node else 1
        self.node = node
        if self.known or self.above < LINK_WINDOWS:
            return None, []
        row = int(np.flatnonzero(measured.sample.node == worst)[0])
        self.known[node] = int(measured.sample.rank[row])
        words = (
            f"round trips {trips[worst] * 1e3:.1f} ms instead of {self._usual(node) * 1e3:.1f} ms"
        )
        if following is not None:
            next_node = measured.sample.nodes[following].node
            words += (
                f", and {trips[following] * 1e3:.1f} ms instead of "
                f"{self._usual(next_node) * 1e3:.1f} ms from {next_node}, which sends to it in a "
                f"ring"
            )
        return SlowLink(row, words, measured.step_s - usual, measured.step_s), []

    def _learn(self, measured: Measured, trips: Array) -> None:
        self.slow = self.above = 0
        if not measured.step_s > 0:
            return
        self.steps.append(measured.step_s)
        for node, trip_s in zip(measured.sample.nodes, trips.tolist(), strict=True):
            if np.isfinite(trip_s):
                self.trips.setdefault(node.node, deque(maxlen=_KEPT)).append(trip_s)

    def _good_again(self) -> list[int]:
        self.below += 1
        if self.below < LINK_WINDOWS or not self.known:
            return []
        over = list(self.known.values())
        self.known.clear()
        return over

    def _usual(self, node: str) -> float:
        return float(np.median(self.trips[node])) if node in self.trips else float("nan")

    def _worst(self, measured: Measured, trips: Array) -> tuple[int, int | None] | None:
        """The only node whose round trips became far longer than those of all others.

        In a ring those of the next node do, too: it sends to the slow one. It comes second.
        """
        if len(trips) < 3:
            return None  # which of two ends is slow nobody can tell
        usual = np.array([self._usual(one.node) for one in measured.sample.nodes])
        # Connections that are idle tell nothing, and wait for nothing.
        more = np.nan_to_num(trips - usual)

        def stand_out(*nodes: int) -> bool:
            others = np.delete(more, nodes)
            least = max(
                _LEAST_S, _TIMES_NEXT * float(others.max()),
                _TIMES_OTHERS * float(np.median(others)),
            )  # fmt: skip
            return all(
                more[one] >= max(least, _TIMES * float(np.nan_to_num(usual[one]))) for one in nodes
            )

        first, second = np.argsort(-more, kind="stable")[:2].tolist()
        if stand_out(first, second) and more[second] >= _PART_OF_FIRST * more[first]:
            for one, following in ((first, second), (second, first)):
                if (one + 1) % len(trips) == following:
                    return one, following
        return (first, None) if stand_out(first) else None


def _by_node(measured: Measured) -> Array:
    """The longest round trips of each node's ranks; NaN where none is known."""
    found = np.full(len(measured.sample.nodes), np.nan)
    np.fmax.at(found, measured.sample.node, measured.signal("round_trip_s"))
    return found
