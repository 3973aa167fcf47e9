"""Causes outside of ranks that slow the whole job: a slow link, or a host that holds ranks back.

Own times of ranks do not show them, since all ranks wait within collectives. Connections or the
kernel's figures do.
"""

import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from everstep.slow_rank_causes import SlowRankCause
from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.live.causes import (
    Blame,
    has_own_cause,
    held_back,
    throttled,
)
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.live.slow_row import EXPLAINS, SlowRow, SlowSignal, peers_of
from everstep_services.straggler.domain.operations import Array, cause_of

_LINK_CONFIDENCE = 0.5
"""For a node that its connections accuse, and not its own time."""
_HOST_CONFIDENCE = 0.7
"""For a node that the kernel's figures accuse, and not its own time."""
LINK_WINDOWS = 3
"""This many windows make a link slow, or good again."""
_LEAST = 3
"""At least this many earlier windows define the usual values."""
_KEPT = 30
_TIMES, _TIMES_IN_RING = 2.0, 0.5
"""Round trips of a slow node exceed what is usual for it by this many times what is usual. If two
neighbours in a ring stand out together, half as much again is enough: chance seldom does that."""
_TIMES_NEXT, _TIMES_NEXT_IN_RING = 3.0, 1.5
"""And they grew by this many times as much as those of any other node."""
_TIMES_OTHERS = 4.0
"""And by this many times as much as those of the other nodes in the median."""
_PART_OF_FIRST = 0.5
"""In a ring, the next node's sends to a slow node are delayed by at least this share of it."""
_LEAST_S = 0.002
_TELLS, _TELLS_TIMES = 0.2, 3.0
"""A quota that held one rank back for this share is to blame, too, if it is this many times as much
as on any other node: the rest is what others lost by waiting."""
_EXPLAINS = 0.5
"""If a rank's own time exceeds others' by this share of what steps lost, or its host held it back
for as long, no link is to blame: a node that sends to a busy host waits for its answers, too."""


@dataclass(frozen=True, slots=True)
class SlowNode:
    """The connections or the host of one node stand out, and steps are longer."""

    row: int
    """The node's first rank, or the one that its host held back the longest."""
    cause: SlowRankCause
    confidence: float
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
    recent: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=LINK_WINDOWS))
    """Round trips by node, in the latest windows: those of one window vary too much."""
    excess_s: deque[Array] = field(default_factory=lambda: deque(maxlen=LINK_WINDOWS))
    """By rank, in the latest windows: by how much its own time exceeds that of its role."""
    held_s: deque[Array] = field(default_factory=lambda: deque(maxlen=LINK_WINDOWS))
    """By rank, in the latest windows: for how much longer than others its host held it back."""
    throttled_s: deque[Array] = field(default_factory=lambda: deque(maxlen=LINK_WINDOWS))
    """By rank, in the latest windows: for how much longer than others a quota held it back."""
    good: int = 0
    """The evidence that slow links are good again: see `_good_again`."""
    slow: int = 0
    """For how many windows steps have been longer without a rank's own time explaining it."""
    slow_ranks: dict[str, int] = field(default_factory=dict)
    """Nodes that were found, with the rank that each is reported under."""
    lost_s: float = 0.0
    """By how much a step was longer than usual, in the last window."""

    def hear(self, measured: Measured, excess_s: Array) -> Array:
        """Take in a window's round trips, and by how much own times exceed others', by rank.

        Returns the round trips of each node in the latest windows.
        """
        self.excess_s.append(excess_s)
        for kept, by_row in ((self.held_s, held_back), (self.throttled_s, throttled)):
            by_rank = np.full(len(excess_s), np.nan)
            by_rank[measured.sample.rank] = by_row(measured)
            kept.append(by_rank)
        names = [node.node for node in measured.sample.nodes]
        self.recent.append(dict(zip(names, _by_node(measured).tolist(), strict=True)))
        nan = float("nan")
        return np.array(
            [finite_median(trips.get(name, nan) for trips in self.recent) for name in names]
        )

    def observe(
        self, measured: Measured, trips: Array, ratio: float, is_explained: bool
    ) -> tuple[SlowNode | None, list[int]]:
        """Judge a window by these round trips, if no slow rank explains that steps are longer.

        Returns the node that was found, and the ranks whose links are good again.
        """
        usual = float(np.median(self.steps)) if len(self.steps) >= _LEAST else float("nan")
        self.lost_s = max(0.0, measured.step_s - usual) if np.isfinite(usual) else 0.0
        if not measured.step_s > (1 + ratio) * usual:
            self._learn(measured)
            return None, self._good_again(2)
        if is_explained or _most(self.excess_s)[1] >= _EXPLAINS * self.lost_s > 0:
            self.slow = 0
            return None, self._good_again(1)
        self.slow += 1
        if self.slow > _KEPT and not self.slow_ranks:
            self.steps.clear()  # by now steps of this length are usual
        if self.slow < LINK_WINDOWS:
            return None, []
        suspect = self._busy_host(measured)
        if suspect is None and not self._is_throttled():
            suspect = self._slow_link(measured, trips)
        node = None if suspect is None else measured.sample.nodes[
            int(measured.sample.node[suspect.row])
        ].node  # fmt: skip
        if self.slow_ranks:
            self.good = 0 if node in self.slow_ranks else self.good
            return None, [] if node in self.slow_ranks else self._good_again(1)
        if suspect is None or node is None:
            return None, []
        self.good = 0
        self.slow_ranks[node] = int(measured.sample.rank[suspect.row])
        return suspect, []

    def held_back_s(self, rank: int) -> float:
        """For how much longer than others its host held a rank back: the most of late windows."""
        of_rank = [
            window[rank]
            for window in self.held_s
            if rank < len(window) and np.isfinite(window[rank])
        ]
        return float(max(of_rank, default=0.0))

    def _is_throttled(self) -> bool:
        """A quota held a rank back for most of what steps lost, in one of the latest windows.

        The kernel counts that when the time is over, which may be in another window.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # windows without data
            most_s = float(np.nan_to_num(np.nanmax(np.array(list(self.throttled_s)))))
        return most_s >= _TELLS * self.lost_s > 0

    def _busy_host(self, measured: Measured) -> SlowNode | None:
        """The node whose host holds a rank back for most of what steps lost."""
        rank, held_s = _most(self.held_s)
        if not held_s >= _EXPLAINS * self.lost_s > 0:
            rank, held_s = self._throttled_most(measured)
        rows = np.flatnonzero(measured.sample.rank == rank)
        if not len(rows) or not self.lost_s > 0:
            return None
        row = int(rows[0])
        node = measured.sample.nodes[int(measured.sample.node[row])].node
        words = (
            f"the host of {node} kept rank {rank} from running for {held_s * 1e3:.1f} ms a step "
            f"more than others"
        )
        return SlowNode(row, "host", _HOST_CONFIDENCE, words, self.lost_s, measured.step_s)

    def _throttled_most(self, measured: Measured) -> tuple[int, float]:
        """The rank that a quota holds back far more than those of other nodes; -1 if none."""
        rank, most_s = _most(self.throttled_s)
        row = np.flatnonzero(measured.sample.rank == rank)
        if not len(row) or not most_s >= _TELLS * self.lost_s:
            return -1, 0.0
        others = measured.sample.rank[measured.sample.node != measured.sample.node[row[0]]]
        _, next_s = _most([window[others] for window in self.throttled_s])
        return (rank, most_s) if most_s >= _TELLS_TIMES * next_s else (-1, 0.0)

    def _slow_link(self, measured: Measured, trips: Array) -> SlowNode | None:
        """The node whose connections stand out."""
        stands_out = self._worst(measured, trips)
        if stands_out is None:
            return None
        worst, following = stands_out
        node = measured.sample.nodes[worst].node
        words = (
            f"the connections of {node} are the only ones that stand out: round trips "
            f"{trips[worst] * 1e3:.1f} ms instead of {self._usual(node) * 1e3:.1f} ms"
        )
        if following is not None:
            next_node = measured.sample.nodes[following].node
            words += (
                f", and {trips[following] * 1e3:.1f} ms instead of "
                f"{self._usual(next_node) * 1e3:.1f} ms from {next_node}, which sends to it in a "
                f"ring"
            )
        row = int(np.flatnonzero(measured.sample.node == worst)[0])
        return SlowNode(row, "network", _LINK_CONFIDENCE, words, self.lost_s, measured.step_s)

    def _learn(self, measured: Measured) -> None:
        self.slow = 0
        if not measured.step_s > 0:
            return
        self.steps.append(measured.step_s)
        for node, trip_s in self.recent[-1].items():
            if np.isfinite(trip_s):
                self.trips.setdefault(node, deque(maxlen=_KEPT)).append(trip_s)

    def _good_again(self, times: int) -> list[int]:
        """The ranks whose links are good again.

        A window in which steps are as long as usual counts twice as much as one in which they are
        longer, but not by these links.
        """
        self.good += times
        if self.good < 2 * LINK_WINDOWS or not self.slow_ranks:
            return []
        over = list(self.slow_ranks.values())
        self.slow_ranks.clear()
        return over

    def _usual(self, node: str) -> float:
        return float(np.median(self.trips[node])) if node in self.trips else float("nan")

    def _worst(self, measured: Measured, trips: Array) -> tuple[int, int | None] | None:
        """The only node whose round trips became far longer than those of all others.

        In a ring those of the next node do, too: it sends to the slow node, and comes second. A
        node that stands out alone is named later: often the node that it sends to is the slow one,
        and its own connections will show it.
        """
        if len(trips) < 3:
            return None  # with two nodes, the figures do not show which end is slow
        usual = np.array([self._usual(node.node) for node in measured.sample.nodes])
        # Connections that are idle tell nothing, and wait for nothing.
        more = np.nan_to_num(trips - usual)

        def stand_out(*nodes: int, times: float, times_next: float) -> bool:
            others = np.delete(more, nodes)
            least = max(
                _LEAST_S, times_next * float(others.max()),
                _TIMES_OTHERS * float(np.median(others)),
            )  # fmt: skip
            return all(
                more[node] >= max(least, times * float(np.nan_to_num(usual[node])))
                for node in nodes
            )

        first, second = np.argsort(-more, kind="stable")[:2].tolist()
        if more[second] >= _PART_OF_FIRST * more[first] and stand_out(
            first, second, times=_TIMES_IN_RING, times_next=_TIMES_NEXT_IN_RING
        ):
            for slow, following in ((first, second), (second, first)):
                if (slow + 1) % len(trips) == following:
                    return slow, following
        is_sure = self.slow >= 2 * LINK_WINDOWS
        if is_sure and stand_out(first, times=_TIMES, times_next=_TIMES_NEXT):
            return first, None
        return None


def _most(windows: Iterable[Array]) -> tuple[int, float]:
    """The rank with the largest median over windows, and that median; 0 where nothing is known."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # ranks without data
        medians = np.nan_to_num(np.nanmedian(np.array(list(windows)), axis=0))
    if not len(medians):
        return -1, 0.0
    rank = int(np.argmax(medians))
    return rank, float(medians[rank])


def _by_node(measured: Measured) -> Array:
    """The longest round trips of each node's ranks; NaN where none is known."""
    longest = np.full(len(measured.sample.nodes), np.nan)
    np.fmax.at(longest, measured.sample.node, measured.signal("round_trip_s"))
    return longest


_RING_TRIPS, _RING_LEAST_S = 2.0, 0.002
"""If the round trips of a rank's neighbour are this many times as long, and this much longer, than
its own, and the rank leaves collectives late, then the link from the neighbour is slow."""
_RING_OF_LOSS = 0.1
"""And longer by this share of what is lost in a step: who is accused must explain it."""
_RING_CONFIDENCE = 0.6


def slow_sender(measured: Measured, row: int, trips: Array) -> int | None:
    """The row whose link keeps this one in collectives, by round trips of nodes; None if none does.

    In a ring each rank sends to the rank before it. If a rank's link is slow, the rank before it is
    the last to leave a collective, and has quick connections itself. The rank after it has slow
    connections, too: it sends to the rank with the slow link.
    """
    peers = peers_of(measured, row)
    own_time = SlowSignal("own", float(measured.own_s[row]), finite_median(measured.own_s[peers]))
    case = SlowRow(measured, row, peers, max(own_time.excess, 1e-9))
    sender = _successor(measured, row)
    if sender is None or has_own_cause(case):
        return None
    node = measured.sample.node
    if node[sender] == node[row]:
        return None  # there is no link between them
    own_s = float(np.nan_to_num(trips[node[row]]))
    more_s = trips[node[sender]] - own_s
    if not more_s > max((_RING_TRIPS - 1) * own_s, _RING_LEAST_S, _RING_OF_LOSS * case.lost_s):
        return None  # too little, or a loss that such a short delay cannot explain
    if _is_own(case, more_s):
        return None
    others = np.delete(trips, [node[sender], (node[sender] + 1) % len(trips)])
    return sender if trips[node[sender]] >= np.nanmax(others, initial=0.0) else None


def _is_own(case: SlowRow, more_s: float) -> bool:
    """Whether a section explains the excess in which no rank waits for others.

    If the section computes, and the processor did not, round trips explain it that grew by half.
    """
    section = next(iter(case.sections()), None)
    if section is None or section.excess < EXPLAINS * case.lost_s:
        return False
    if cause_of(section.name) != "compute":
        return True
    if more_s >= EXPLAINS * case.lost_s:
        return False
    column = case.measured.sections.names.index(section.name)
    return finite_median(case.measured.waits_inside[case.peers, column]) < 0.1 * case.lost_s


def _successor(measured: Measured, row: int) -> int | None:
    """The row that is next in the ring of the group that the rank has the most entries in."""
    if measured.entered is None:
        return None
    matched = measured.entered.entries
    groups, count = np.unique(matched.group[matched.row == row], return_counts=True)
    if not len(groups):
        return None
    rows = np.unique(matched.row[matched.group == groups[np.argmax(count)]])
    place = int(np.searchsorted(rows, row))
    return int(rows[(place + 1) % len(rows)]) if len(rows) > 2 else None


def from_link(measured: Measured, row: int, sender: int, trips: Array, why: Blame) -> Blame:
    """The same finding, about the rank whose link is slow."""
    node = measured.sample.node
    words = (
        f"round trips of its connections {trips[node[sender]] * 1e3:.2f} ms against "
        f"{_milliseconds(trips[node[row]])} of rank {int(measured.sample.rank[row])}, "
        f"which it sends to in a ring, and which is the last to leave collectives: {why.reason}"
    )
    return replace(why, cause="network", reason=words, section=None, confidence=_RING_CONFIDENCE)


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if np.isfinite(value) else "unknown ones"
