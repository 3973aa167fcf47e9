"""Rules that name slow ranks, ours and others', on the same times: steps × ranks of one role.

The others are re-implemented from what is published, not the authors' programs.
"""

from collections.abc import Callable

import numpy as np

from benchmarks.straggler_traces.distributions import Array
from everstep_services.straggler.domain.scores import lower_medians
from everstep_services.straggler.domain.suspects import spells, windows_of
from everstep_services.straggler.domain.verdict import SlownessLimits

WINDOW = 10
Rule = Callable[[Array], set[int]]


def everstep(own: Array, limits: SlownessLimits | None = None) -> set[int]:
    """Ours, at the defaults."""
    role = np.zeros(own.shape[1], dtype=np.int64)
    windows = list(windows_of(own, role, WINDOW))
    return {one.start.subject for one in spells(windows, limits or SlownessLimits())}


def windows(own: Array) -> Array:
    """Windows × ranks: medians."""
    count = len(own) // WINDOW
    found: Array = np.median(own[: count * WINDOW].reshape(count, WINDOW, -1), axis=1)
    return found


def median_and_5_mad(own: Array) -> set[int]:
    """EROICA's: above the median of all ranks by 5 median absolute deviations, in any window."""
    values = windows(own)
    middle = np.median(values, axis=1, keepdims=True)
    spread = np.median(np.abs(values - middle), axis=1, keepdims=True)
    return _ranks((values > middle + 5 * spread).any(axis=0))


def z_score(own: Array) -> set[int]:
    """Above the mean of all ranks by 3 standard deviations, in any window."""
    values = windows(own)
    high = values > values.mean(axis=1, keepdims=True) + 3 * values.std(axis=1, keepdims=True)
    return _ranks(high.any(axis=0))


def nvrx(own: Array) -> set[int]:
    """NVRx's: a relative score below 0.75 in any report, of 60 steps."""
    found: set[int] = set()
    for first in range(0, len(own), 60):
        part = own[first : first + 60]
        rank = np.tile(np.arange(own.shape[1]), len(part))
        medians = lower_medians(rank, np.zeros_like(rank), part.ravel(), (own.shape[1], 1))[:, 0]
        found |= _ranks(medians.min() / medians < 0.75)
    return found


def greyhound(own: Array) -> set[int]:
    """Greyhound's: a change point with certainty 0.9, 10 % before to after, and against the median.

    Bayesian online change points over the windows of each rank, with normal data whose variance is
    that of the rank's own differences.
    """
    values = windows(own)
    count, ranks = values.shape
    scale = np.median(np.abs(np.diff(values, axis=0)), axis=0) * 1.4826 / np.sqrt(2) + 1e-9
    series = (values - values[0]) / scale
    weights = np.ones((1, ranks))
    mean, seen = np.zeros((1, ranks)), np.full((1, ranks), 1e-4)
    hazard, changed = 1 / 100, np.zeros(ranks, dtype=bool)
    for time in range(count):
        variance = 1 + 1 / seen
        likely = np.exp(-((series[time] - mean) ** 2) / 2 / variance) / np.sqrt(variance) + 1e-300
        grown, fresh = weights * likely * (1 - hazard), (weights * likely * hazard).sum(axis=0)
        weights = np.concatenate([fresh[None], grown])
        weights /= weights.sum(axis=0)
        mean = np.concatenate([np.zeros((1, ranks)), (mean * seen + series[time]) / (seen + 1)])
        seen = np.concatenate([np.full((1, ranks), 1e-4), seen + 1])
        weights, mean, seen = weights[:60], mean[:60], seen[:60]
        if time >= 6:
            short = weights[:4].sum(axis=0) > 0.9
            before, after = (
                values[: time - 2].mean(axis=0),
                values[time - 2 : time + 1].mean(axis=0),
            )
            slower = (after > before * 1.10) & (after > np.median(after) * 1.10)
            changed |= short & slower
    return _ranks(changed)


def _ranks(flags: Array) -> set[int]:
    return {int(one) for one in np.flatnonzero(flags)}


RULES: dict[str, Rule] = {
    "everstep": everstep,
    "median + 5 MAD": median_and_5_mad,
    "z-score": z_score,
    "Greyhound": greyhound,
    "NVRx": nvrx,
}
