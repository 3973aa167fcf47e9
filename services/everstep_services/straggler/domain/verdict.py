"""Who is slow: lateness that persists against a role group, with hysteresis on both sides.

Pure: `(state, window) -> (state, changes)`. A window says how much time each subject, a rank or a
process group, needed by itself; who waits for others is not slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from everstep_services.straggler.domain.operations import Array


@dataclass(frozen=True, slots=True)
class Limits:
    """From when on a subject is slow, and from when on it is not any more."""

    found_ratio: float = 0.03
    """So much longer than the median of its role group, at least: healthy ranks differ, too."""
    cleared_ratio: float = 0.015
    """Found ones are cleared below this; where noise raises the limit to be found, this rises by
    the same factor."""
    horizons: tuple[tuple[int, float], ...] = (
        (3, 7.0), (6, 6.0), (12, 5.5), (24, 5.0), (48, 5.0), (96, 5.0),
    )  # fmt: skip
    """Over so many windows, by so many standard errors: what is little shows over many windows."""
    share: float = 0.7
    """The least share of those windows in which it was slower than the median."""
    floor_ratio: float = 0.001
    """The least noise that is assumed of a window."""
    peers: int = 3
    """A role group with fewer members is not judged."""


@dataclass(frozen=True, slots=True)
class Window:
    """One span of steps, the same for all subjects."""

    number: int
    subjects: Array
    """Their numbers, in order and distinct."""
    own_s: Array
    """What each needed by itself in a step, in the median; NaN where it was not seen."""
    role: Array
    """The index of each one's role group."""


@dataclass(frozen=True, slots=True)
class Slow:
    """What is known of a subject that was found."""

    since: int
    """The first window of those that it was found by."""
    found: int
    """The window in which it was found."""
    horizon: int


@dataclass(frozen=True, slots=True)
class Found:
    """A subject is slow; given once."""

    subject: int
    role: int
    ratio: float
    """So much longer than its role group's median: 0.1 for 10 %."""
    noise_ratio: float
    """The standard error of that."""
    since: int
    window: int
    windows: int


@dataclass(frozen=True, slots=True)
class Cleared:
    """A slow subject keeps up again, or is gone; given once."""

    subject: int
    window: int
    since: int
    ratio: float | None
    """None where it is gone."""
    limit: float | None = None
    """What that is below, noise counted in."""


@dataclass(frozen=True, slots=True)
class State:
    """What is kept from window to window: bounded by the number of subjects."""

    subjects: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ratios: Array = field(default_factory=lambda: np.empty((0, 0)))
    """The last windows in which each subject was seen, the newest last: how much longer than the
    median it took. Windows from before it was found, or cleared, are not kept."""
    variance: Mapping[int, tuple[float, int]] = field(default_factory=dict)
    """Of one window, by role group: how far its members are apart, over so many windows."""
    slow: Mapping[int, Slow] = field(default_factory=dict)


def observe(
    state: State, window: Window, limits: Limits
) -> tuple[State, tuple[Found | Cleared, ...]]:
    """Take one window in. Returns what changed by it, found ones in the order of their ratios."""
    ratios, spread = compare(window, limits)
    variance = _smoothed(state.variance, spread)
    history = _aligned(state, window.subjects, limits.horizons[-1][0])
    seen = np.isfinite(ratios)
    history[seen] = np.c_[history[seen, 1:], ratios[seen]]
    roles, at = np.unique(window.role, return_inverse=True)
    by_role = np.array([variance.get(int(role), (np.inf, 0))[0] for role in roles])
    noise = np.maximum(np.sqrt(by_role), limits.floor_ratio)[at]
    found = _found(state, window, history, noise, limits)
    cleared, slow = _cleared(state, window, history, noise, limits)
    slow |= {one.subject: Slow(one.since, one.window, one.windows) for one in found}
    # What it was found by must not keep it from being cleared, and the reverse.
    changes: tuple[Found | Cleared, ...] = (*found, *cleared)
    history[np.isin(window.subjects, [one.subject for one in changes])] = np.nan
    after = replace(state, subjects=window.subjects, ratios=history, variance=variance, slow=slow)
    return after, changes


def compare(window: Window, limits: Limits) -> tuple[Array, dict[int, float]]:
    """How much longer each subject took than its role group's median, and the groups' variances.

    NaN for those that cannot be compared.
    """
    ratios = np.full(len(window.subjects), np.nan)
    spread: dict[int, float] = {}
    order = np.argsort(window.role, kind="stable")
    bounds = np.flatnonzero(np.diff(window.role[order])) + 1
    for rows in np.split(order, bounds):
        own = window.own_s[rows]
        seen = rows[np.isfinite(own)]
        if len(seen) < limits.peers:
            continue
        baseline = float(np.median(window.own_s[seen]))
        if baseline <= 0:
            continue
        ratios[seen] = window.own_s[seen] / baseline - 1
        spread[int(window.role[rows[0]])] = _variance(ratios[seen])
    return ratios, spread


def middle(values: Array) -> Array:
    """The mean of the middle half of each row: outliers do not count, and little is lost."""
    cut = values.shape[1] // 4 if values.shape[1] > 3 else (values.shape[1] - 1) // 2
    ordered = np.sort(values, axis=1)
    found: Array = ordered[:, cut : values.shape[1] - cut].mean(axis=1)
    return np.where(np.isfinite(values).all(axis=1), found, np.nan)


_MOST = 0.75


def middle_of_most(values: Array) -> Array:
    """The same of what is known of each row; NaN where a quarter or more is not."""
    ordered = np.sort(values, axis=1)
    count = np.isfinite(ordered).sum(axis=1)
    cut = np.where(count > 3, count // 4, np.maximum(count - 1, 0) // 2)
    each = np.arange(len(values))
    sums = np.cumsum(np.nan_to_num(ordered), axis=1, dtype=np.float64)
    sums = np.concatenate([np.zeros((len(values), 1)), sums], axis=1)
    parts = np.maximum(count - 2 * cut, 1)
    found: Array = (sums[each, count - cut] - sums[each, cut]) / parts
    return np.where(count > _MOST * values.shape[1], found, np.nan)


_FEW, _OF_FEW, _OF_MANY = 6, 1.16, 1.09
"""The standard error of such a mean of few, or of many, over that of the mean of all."""


def _error_of(horizon: int) -> float:
    """The standard error of the middle half of so many windows, over the noise of one."""
    return float((_OF_FEW if horizon < _FEW else _OF_MANY) / np.sqrt(horizon))


def _variance(ratios: Array) -> float:
    """Robust: by the median absolute deviation, corrected for small groups."""
    count = len(ratios)
    deviation = 1.4826 * float(np.median(np.abs(ratios - np.median(ratios))))
    return (deviation * (1 + 1.2 / (count - 1))) ** 2


def _smoothed(
    before: Mapping[int, tuple[float, int]], now: Mapping[int, float]
) -> dict[int, tuple[float, int]]:
    """Over some ten windows: that of a single one, of eight ranks, is a guess."""
    after = dict(before)
    for role, variance in now.items():
        known, count = before.get(role, (0.0, 0))
        after[role] = known + (variance - known) / min(count + 1, 10), count + 1
    return after


def _aligned(state: State, subjects: Array, length: int) -> Array:
    """The history of these subjects: those that are new have none."""
    if state.ratios.shape[1:] == (length,) and np.array_equal(state.subjects, subjects):
        return state.ratios.copy()
    history = np.full((len(subjects), length), np.nan, dtype=np.float32)
    _, kept, now = np.intersect1d(state.subjects, subjects, return_indices=True)
    if len(kept):
        history[now] = state.ratios[kept]
    return history


def _found(
    state: State, window: Window, history: Array, noise: Array, limits: Limits
) -> list[Found]:
    best: dict[int, Found] = {}
    still = middle(history[:, -limits.horizons[0][0] :]) >= limits.cleared_ratio
    rows = np.flatnonzero(still & np.isfinite(window.own_s))  # what is not seen is not judged
    history = history[rows]
    for horizon, errors in limits.horizons:
        recent = history[:, -horizon:]
        is_first = horizon == limits.horizons[0][0]
        ratio = middle(recent) if is_first else middle_of_most(recent)
        error = noise[rows] * (_OF_FEW if horizon < _FEW else _OF_MANY) / np.sqrt(horizon)
        limit = np.hypot(limits.found_ratio, errors * error)
        share = 1.0 if is_first else limits.share
        above = (recent > 0).sum(axis=1) / np.maximum(np.isfinite(recent).sum(axis=1), 1)
        for row in np.flatnonzero((ratio >= limit) & (above >= share)):
            subject = int(window.subjects[rows[row]])
            if subject in state.slow or subject in best:
                continue
            began = int(np.argmax(recent[row] >= ratio[row] / 2))
            best[subject] = Found(
                subject, int(window.role[rows[row]]), float(ratio[row]), float(error[row]),
                window.number - horizon + 1 + began, window.number, horizon,
            )  # fmt: skip
    return sorted(best.values(), key=lambda one: -one.ratio)


def _cleared(
    state: State, window: Window, history: Array, noise: Array, limits: Limits
) -> tuple[list[Cleared], dict[int, Slow]]:
    slow, cleared = dict(state.slow), []
    horizons = dict(limits.horizons)
    share = limits.cleared_ratio / limits.found_ratio
    for subject, known in state.slow.items():
        row = int(np.searchsorted(window.subjects, subject))
        if row == len(window.subjects) or window.subjects[row] != subject:
            cleared.append(Cleared(subject, window.number, known.since, None))
            del slow[subject]
            continue
        recent = history[row, -known.horizon :]
        if not np.isfinite(recent).all() or not np.isfinite(window.own_s[row]):
            continue
        ratio = float(middle(recent[None])[0])
        error = noise[row] * _error_of(known.horizon)
        limit = share * float(np.hypot(limits.found_ratio, horizons[known.horizon] * error))
        if ratio < limit:
            cleared.append(Cleared(subject, window.number, known.since, ratio, limit))
            del slow[subject]
    return cleared, slow
