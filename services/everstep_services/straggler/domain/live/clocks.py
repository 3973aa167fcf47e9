"""How far the clocks of nodes are apart: what they measured, bounded by the collectives."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from everstep_services.straggler.domain.live.samples import NodeSample
from everstep_services.straggler.domain.operations import Array

_KEPT = 8
_MOST_DRIFT = 500e-6
_LIKELY_DRIFT = 200e-6
"""No clock drifts faster than this, unless somebody sets it."""
_MOST_AGE_S = 120.0


@dataclass(frozen=True, slots=True)
class Alignment:
    """What to subtract from each node's clock, and how far that is off at most."""

    offset_s: Array
    """By node; NaN where it could not be measured."""
    drift: Array
    """By node: seconds per second, counted from `at_us`."""
    at_us: Array
    error_s: Array
    """By node; infinite where it could not be measured."""


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    offset_s: float
    error_s: float


class NodeClocks:
    """The clocks of a round's nodes, window by window."""

    def __init__(self) -> None:
        self._reference = ""
        self._kept: dict[str, deque[_Reading]] = {}

    def align(self, nodes: Sequence[NodeSample]) -> Alignment:
        """Bring all nodes to the clock that most of them know."""
        at_us = np.array([_newest(node) for node in nodes], dtype=np.int64)
        measured = self._measured(nodes)
        offset = np.array([reading[0] for reading in measured])
        error = np.array([reading[1] for reading in measured])
        drift = np.zeros(len(nodes))
        for number, node in enumerate(nodes):
            if not math.isfinite(error[number]):
                offset[number], error[number] = self._kept_of(node.node, at_us[number] / 1e6)
            else:
                reading = _Reading(at_us[number] / 1e6, offset[number], error[number])
                drift[number], wrong = self._drift(node.node, reading)
                error[number] += wrong
        return Alignment(offset, drift, at_us, error)

    def _kept_of(self, node: str, at_s: float) -> tuple[float, float]:
        """The last measurement of a node that could not ask, and how wrong it may be now."""
        kept = self._kept.get(node)
        age_s = at_s - kept[-1].at_s if kept else math.inf
        if not kept or not 0 <= age_s <= _MOST_AGE_S:
            return math.nan, math.inf
        first, last = kept[0], kept[-1]
        span = last.at_s - first.at_s
        slope = (last.offset_s - first.offset_s) / span if span > 0 else 0.0
        wrong = (last.error_s + first.error_s) / span if span > 0 else _LIKELY_DRIFT
        return last.offset_s + slope * age_s, last.error_s + min(wrong, _LIKELY_DRIFT) * age_s

    def _measured(self, nodes: Sequence[NodeSample]) -> list[tuple[float, float]]:
        """Of each node its offset against the reference, and the error of that."""
        readings = [
            {clock.clock: (clock.offset_s, clock.error_s) for clock in node.clocks}
            for node in nodes
        ]
        counts = Counter(clock for by_clock in readings for clock in by_clock)
        if not counts:
            return [(math.nan, math.inf)] * len(nodes)
        best = max(counts.items(), key=lambda item: (item[1], item[0] == self._reference, item[0]))
        if counts[self._reference] * 2 < best[1]:
            self._reference, self._kept = best[0], {}
        ties = _ties(readings, self._reference)
        return [_best(by_clock, ties) for by_clock in readings]

    def _drift(self, node: str, now: _Reading) -> tuple[float, float]:
        """How fast a node's clock drifts, and by how much the sample may be wrong for it."""
        kept = self._kept.setdefault(node, deque(maxlen=_KEPT))
        if kept and now.at_s <= kept[-1].at_s:
            kept.clear()
        kept.append(now)
        first = kept[0]
        span = now.at_s - first.at_s
        if span <= 0:
            return 0.0, 0.0
        slope = (now.offset_s - first.offset_s) / span
        if abs(slope) > _MOST_DRIFT + (now.error_s + first.error_s) / span:
            kept.clear()  # the clock was set
            kept.append(now)
            return 0.0, 0.0
        is_certain = abs(now.offset_s - first.offset_s) > now.error_s + first.error_s
        return (slope if is_certain else 0.0), 0.0


_LEAST_WRONG_S = 0.001


def contradicted(alignment: Alignment, ahead_s: Array, behind_s: Array) -> Array:
    """The nodes whose measured clocks contradict the collectives: the clocks were set meanwhile."""
    with np.errstate(invalid="ignore"):
        limit = -(alignment.error_s + _LEAST_WRONG_S)
        is_wrong: Array = (ahead_s < limit) | (behind_s < limit)
    return is_wrong


def without(alignment: Alignment, nodes: Array) -> Alignment:
    """The alignment, with nothing known of the clocks of these nodes."""
    return replace(
        alignment,
        offset_s=np.where(nodes, np.nan, alignment.offset_s),
        drift=np.where(nodes, 0.0, alignment.drift),
        error_s=np.where(nodes, np.inf, alignment.error_s),
    )


def bounded(alignment: Alignment, ahead_s: Array, behind_s: Array) -> Alignment:
    """The alignment, with errors no larger than what the collectives allow."""
    most = np.maximum(np.abs(ahead_s), np.abs(behind_s))
    return replace(alignment, error_s=np.fmin(alignment.error_s, most))


def _newest(node: NodeSample) -> int:
    return int(node.entry_us.max()) if len(node.entry_us) else 0


def _ties(
    readings: Sequence[Mapping[str, tuple[float, float]]], reference: str
) -> dict[str, tuple[float, float]]:
    """How far each clock is ahead of the reference, by the nodes that know both."""
    apart: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for by_clock in readings:
        if reference not in by_clock:
            continue
        offset, error = by_clock[reference]
        for clock, (other, wrong) in by_clock.items():
            apart[clock].append((error + wrong, offset - other))
    ties = {}
    for clock, pairs in apart.items():
        error = min(pair[0] for pair in pairs)
        ties[clock] = (float(np.median([pair[1] for pair in pairs])), error)
    ties[reference] = (0.0, 0.0)
    return ties


def _best(
    by_clock: Mapping[str, tuple[float, float]], ties: Mapping[str, tuple[float, float]]
) -> tuple[float, float]:
    """The offset against the reference, by the way with the least error."""
    ways = [
        (error + ties[clock][1], offset + ties[clock][0])
        for clock, (offset, error) in by_clock.items()
        if clock in ties
    ]
    if not ways:
        return math.nan, math.inf
    error, offset = min(ways)
    return offset, error
