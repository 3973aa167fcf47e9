"""Which subjects are slow: lateness that persists against a role group, with hysteresis.

Pure: `(state, window) -> (state, changes)`. A window says how much time each subject, a rank or a
process group, needed by itself; a subject that waits for others is not slow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from everstep_services.straggler.domain.arrays import middle_of_known, row_medians
from everstep_services.straggler.domain.operations import Array


@dataclass(frozen=True, slots=True)
class SlownessLimits:
    """When a subject counts as slow, and when it no longer does."""

    found_ratio: float = 0.03
    """The least excess over the median of its role group: healthy ranks differ, too."""
    cleared_ratio: float = 0.015
    """Found ones are cleared below this; where noise raises the limit to be found, this rises by
    the same factor."""
    horizons: tuple[tuple[int, float], ...] = (
        (3, 7.0), (6, 6.0), (12, 5.5), (24, 5.0), (48, 5.0), (96, 5.0),
    )  # fmt: skip
    """Windows, and standard errors of each: a small excess shows only over many windows."""
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
    """A subject is slow; returned once."""

    subject: int
    role: int
    ratio: float
    """The excess over its role group's median: 0.1 for 10 %."""
    noise_ratio: float
    """The standard error of that."""
    since: int
    window: int
    windows: int
    growth_ratio: float | None = None
    """How much longer it took than in its own earlier windows; None where that did not count: it
    does where half of its role group or more became slower."""


@dataclass(frozen=True, slots=True)
class Cleared:
    """A slow subject keeps up again, or is gone; returned once."""

    subject: int
    window: int
    since: int
    ratio: float | None
    """None where it is gone."""
    limit: float | None = None
    """The limit that the ratio is below, with noise."""


@dataclass(frozen=True, slots=True)
class Noise:
    """How far the members of a role group are apart in one window, estimated over some ten windows.

    What they are in an episode counts while it lasts only; the newest windows can be taken back,
    as an episode is found some windows after it began.
    """

    variance: float = 0.0
    windows: int = 0
    recent: tuple[tuple[int, float], ...] = ()
    """The number and the variance of the newest windows, which are not yet in the above."""
    episode: tuple[float, int] = (0.0, 0)
    """The variance of the healthy ranks while others are slow, and its number of windows."""

    def now(self) -> float:
        """The variance, recent windows included; infinite where none is known."""
        total, count = self.variance, self.windows
        for _, variance in self.recent:
            total, count = _smoothed(total, count, variance)
        return max(total, self.episode[0]) if count or self.episode[1] else np.inf

    @property
    def is_known(self) -> bool:
        return self.windows + len(self.recent) >= _SMOOTHED

    def taught(self, window: int, variance: float) -> "Noise":
        recent = (*self.recent, (window, variance))
        if len(recent) <= _RECENT:
            return replace(self, recent=recent, episode=(0.0, 0))
        total, count = _smoothed(self.variance, self.windows, recent[0][1])
        return Noise(total, count, recent[1:])

    def meanwhile(self, variance: float) -> "Noise":
        """The noise with one more window of an episode."""
        return replace(self, episode=_smoothed(*self.episode, variance))

    def without(self, since: int) -> "Noise":
        """The noise without the recent windows from `since` on, which belong to an episode."""
        return replace(self, recent=tuple(entry for entry in self.recent if entry[0] < since))


def _smoothed(before: float, count: int, variance: float) -> tuple[float, int]:
    """Over some ten windows: the variance of a single one, of eight ranks, is a guess."""
    return before + (variance - before) / min(count + 1, _SMOOTHED), count + 1


@dataclass(frozen=True, slots=True)
class Compared:
    """How the subjects of one window compare."""

    ratios: Array
    """How much longer each took than its role group's median; NaN where that is unknown."""
    is_usual: Array
    """Whether each is one of those that tell what is usual in its role group."""
    growth: Array
    """How much longer each took than in its own earlier windows, where half of its role group or
    more is slow; NaN elsewhere."""
    spread: Mapping[int, tuple[float, int]]
    """By role group: the variance of the ratios of those that are not slow, and their number."""
    episodes: frozenset[int]
    """The role groups in which more than a few ranks are or became slow."""


@dataclass(frozen=True, slots=True)
class VerdictState:
    """What is kept from window to window: bounded by the number of subjects."""

    subjects: Array = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    ratios: Array = field(default_factory=lambda: np.empty((0, 0)))
    """The last windows in which each subject was seen, the newest last: how much longer than the
    median it took. Windows from before it was found, or cleared, are not kept."""
    earlier: Array = field(default_factory=lambda: np.empty((0, 0)))
    """The own times of the last windows in which each subject did not stand out, the newest
    last."""
    noise: Mapping[int, Noise] = field(default_factory=dict)
    """By role group."""
    slow: Mapping[int, Slow] = field(default_factory=dict)


def observe(
    state: VerdictState, window: Window, limits: SlownessLimits
) -> tuple[VerdictState, tuple[Found | Cleared, ...]]:
    """Take one window in. Returns what changed by it, found ones in the order of their ratios."""
    compared = compare(window, limits, state)
    ratios = compared.ratios
    history = _aligned(state.subjects, state.ratios, window.subjects, limits.horizons[-1][0])
    seen = np.isfinite(ratios)
    history[seen] = np.c_[history[seen, 1:], ratios[seen]]
    noises = _taught(state.noise, window.number, compared, limits)
    roles, at = np.unique(window.role, return_inverse=True)
    by_role = np.array([noises.get(int(role), Noise()).now() for role in roles])
    noise = np.maximum(np.sqrt(by_role), limits.floor_ratio)[at]
    changed = _found(state, window, history, noise, compared.growth, limits)
    cleared, slow = _cleared(state, window, history, noise, limits)
    slow |= {
        change.subject: Slow(change.since, change.window, change.windows) for change in changed
    }
    for change in changed:
        if change.role in noises:
            noises[change.role] = noises[change.role].without(change.since)
    # The windows that a finding rests on must not delay its end, nor the reverse.
    changes: tuple[Found | Cleared, ...] = (*changed, *cleared)
    history[np.isin(window.subjects, [change.subject for change in changes])] = np.nan
    earlier = _aligned(state.subjects, state.earlier, window.subjects, _EARLIER)
    usual = seen & ~np.isin(window.subjects, list(slow)) & (ratios < _GROWN / 2)
    earlier[usual] = np.c_[earlier[usual, 1:], window.own_s[usual]]
    after = VerdictState(window.subjects, history, earlier, noises, slow)
    return after, changes


def compare(window: Window, limits: SlownessLimits, state: VerdictState | None = None) -> Compared:
    """Compare each subject with its role group; `state` has the earlier windows of both."""
    state = state or VerdictState()
    ratios, growth = np.full((2, len(window.subjects)), np.nan)
    is_usual = np.ones(len(window.subjects), dtype=bool)
    spread: dict[int, tuple[float, int]] = {}
    episodes: set[int] = set()
    is_slow = np.isin(window.subjects, list(state.slow))
    earlier = _aligned(state.subjects, state.earlier, window.subjects, _EARLIER)
    grown = window.own_s / row_medians(earlier, _LEAST_EARLIER) - 1
    order = np.argsort(window.role, kind="stable")
    bounds = np.flatnonzero(np.diff(window.role[order])) + 1
    for rows in np.split(order, bounds):
        seen = rows[np.isfinite(window.own_s[rows])]
        if len(seen) < limits.peers:
            continue
        peers = _peers(grown[seen], is_slow[seen], earlier[seen])
        baseline = float(np.median(window.own_s[seen[peers]]))
        if baseline <= 0:
            continue
        ratios[seen] = window.own_s[seen] / baseline - 1
        role = int(window.role[rows[0]])
        if not peers.all():
            growth[seen], is_usual[seen] = grown[seen], peers
        if not peers.all() or is_slow[seen].mean() >= _FEW_SLOW:
            episodes.add(role)
        usual = seen[peers & ~is_slow[seen]]
        if len(usual) > 1:
            spread[role] = _variance(ratios[usual]), len(usual)
    return Compared(ratios, is_usual, growth, spread, frozenset(episodes))


_EARLIER, _LEAST_EARLIER = 24, 6
"""The most and the least earlier windows that define what is usual for a subject."""
_GROWN, _ERRORS = 0.1, 6.0
"""A subject became slower from this excess, and this multiple of its own noise, on."""
_UNCHANGED = 0.9
"""And this share of the others of its role group must be unchanged."""
_MOST_ASKED = 256
_RECENT = 3
_SMOOTHED = 10
_FEW_SLOW = 1 / 16
"""While fewer of a role group are slow, the others go on to tell how large its noise is."""


def _peers(grown: Array, is_slow: Array, earlier: Array) -> Array:
    """Which members of a role group tell what is usual.

    All of them do; their median is not moved by a few. But where half or more are slow, or became
    slower than they were while the others did not, only the others do.
    """
    noise = _own_noise(earlier)
    limit = np.hypot(_GROWN, _ERRORS * noise) if np.isfinite(noise) else np.inf
    became_slow = grown >= limit
    others = ~is_slow & ~became_slow
    is_unchanged = np.abs(grown[others]) < limit / 2
    if not len(is_unchanged) or is_unchanged.mean() < _UNCHANGED:
        others = ~is_slow
    if others.any() and 2 * others.sum() <= len(grown):
        return others
    return np.ones(len(grown), dtype=bool)


def _own_noise(earlier: Array) -> float:
    """How much a member of a role group differs from window to window, in the median."""
    some = earlier[:: max(1, len(earlier) // _MOST_ASKED)]
    usual = row_medians(some, _LEAST_EARLIER)
    some, usual = some[np.isfinite(usual)], usual[np.isfinite(usual)]
    if not len(some):
        return float("nan")
    apart = row_medians(np.abs(some / usual[:, None] - 1), 1)
    return 1.4826 * float(np.median(apart))


def _taught(
    noise: Mapping[int, Noise], window: int, compared: Compared, limits: SlownessLimits
) -> dict[int, Noise]:
    """The noise of each role group, with what this window tells of it."""
    after = dict(noise)
    for role, (variance, count) in compared.spread.items():
        noise_before = after.get(role, Noise())
        if role not in compared.episodes or (count >= limits.peers and not noise_before.is_known):
            after[role] = noise_before.taught(window, variance)
        else:
            after[role] = noise_before.meanwhile(variance)
    return after


def middle(values: Array) -> Array:
    """The mean of the middle half of each row: outliers do not count, and little is lost."""
    cut = values.shape[1] // 4 if values.shape[1] > 3 else (values.shape[1] - 1) // 2
    ordered = np.sort(values, axis=1)
    means: Array = ordered[:, cut : values.shape[1] - cut].mean(axis=1)
    return np.where(np.isfinite(values).all(axis=1), means, np.nan)


_MOST = 0.75


def middle_of_most(values: Array) -> Array:
    """The same of what is known of each row; NaN where a quarter or more is not."""
    counts = np.isfinite(values).sum(axis=1)
    return np.where(counts > _MOST * values.shape[1], middle_of_known(values), np.nan)


_FEW, _OF_FEW, _OF_MANY = 6, 1.16, 1.09
"""The standard error of such a mean of few, or of many, over that of the mean of all."""


def _error_of(horizon: int) -> float:
    """Return the standard error of the middle half of a horizon's windows, over one's noise."""
    return float((_OF_FEW if horizon < _FEW else _OF_MANY) / np.sqrt(horizon))


def _variance(ratios: Array) -> float:
    """Robust: by the median absolute deviation, corrected for small groups."""
    count = len(ratios)
    deviation = 1.4826 * float(np.median(np.abs(ratios - np.median(ratios))))
    return (deviation * (1 + 1.2 / (count - 1))) ** 2


def _aligned(values: Array, kept: Array, subjects: Array, length: int) -> Array:
    """The rows that are kept of these subjects, as a copy: those that are new have nothing."""
    if kept.shape[1:] == (length,) and np.array_equal(values, subjects):
        return kept.copy()
    rows = np.full((len(subjects), length), np.nan, dtype=np.float32)
    if kept.shape[1:] == (length,):
        _, before, now = np.intersect1d(values, subjects, return_indices=True)
        rows[now] = kept[before]
    return rows


def _found(
    state: VerdictState,
    window: Window,
    history: Array,
    noise: Array,
    growth: Array,
    limits: SlownessLimits,
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
                None if np.isnan(growth[rows[row]]) else float(growth[rows[row]]),
            )  # fmt: skip
    return sorted(best.values(), key=lambda change: -change.ratio)


def _cleared(
    state: VerdictState, window: Window, history: Array, noise: Array, limits: SlownessLimits
) -> tuple[list[Cleared], dict[int, Slow]]:
    slow, cleared = dict(state.slow), []
    horizons = dict(limits.horizons)
    share = limits.cleared_ratio / limits.found_ratio
    for subject, spell in state.slow.items():
        row = int(np.searchsorted(window.subjects, subject))
        if row == len(window.subjects) or window.subjects[row] != subject:
            cleared.append(Cleared(subject, window.number, spell.since, None))
            del slow[subject]
            continue
        recent = history[row, -spell.horizon :]
        if not np.isfinite(recent).all() or not np.isfinite(window.own_s[row]):
            continue
        ratio = float(middle(recent[None])[0])
        error = noise[row] * _error_of(spell.horizon)
        limit = share * float(np.hypot(limits.found_ratio, horizons[spell.horizon] * error))
        if ratio < limit:
            cleared.append(Cleared(subject, window.number, spell.since, ratio, limit))
            del slow[subject]
    return cleared, slow
