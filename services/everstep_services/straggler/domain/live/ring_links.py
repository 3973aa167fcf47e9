"""The link of a rank that keeps the rank before it, in a ring, in its collectives."""

from dataclasses import replace

import numpy as np

from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.live.causes import Blame, has_own_cause
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.live.slow_row import EXPLAINS, SlowRow, SlowSignal, peers_of
from everstep_services.straggler.domain.operations import Array, cause_of

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
    own = SlowSignal("own", float(measured.own_s[row]), finite_median(measured.own_s[peers]))
    case = SlowRow(measured, row, peers, max(own.excess, 1e-9))
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
