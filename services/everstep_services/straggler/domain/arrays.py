"""Arithmetic on groups of rows: medians, means and numbers of equal keys."""

from collections.abc import Iterable

import numpy as np

from everstep_services.straggler.domain.operations import Array


def dense(values: Array) -> tuple[Array, Array]:
    """The distinct values in order, and for each value its index among them."""
    distinct, index = np.unique(values, return_inverse=True)
    return distinct, index.reshape(-1)


def combined(*keys: Array) -> Array:
    """For each row a number that is equal where all keys are; dense, from 0."""
    numbers = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        _, index = dense(key)
        numbers = dense(numbers * (int(index.max(initial=0)) + 1) + index)[1]
    return numbers


def medians_by(keys: Array, values: Array, count: int) -> Array:
    """The median of the values with each key below `count`; NaN where there is none."""
    order = np.lexsort((values, keys))
    counts = np.bincount(keys, minlength=count)
    first = np.cumsum(counts) - counts
    medians = np.full(count, np.nan)
    some = counts > 0
    ordered = values[order]
    low = ordered[(first + (counts - 1) // 2)[some]]
    high = ordered[(first + counts // 2)[some]]
    medians[some] = (low + high) / 2
    return medians


def finite_median(values: Array | Iterable[float | None]) -> float:
    """The median of the finite values; NaN where there is none."""
    numbers = values if isinstance(values, np.ndarray) else np.array(list(values), dtype=np.float64)
    finite = numbers[np.isfinite(numbers)]
    return float(np.median(finite)) if len(finite) else float("nan")


def means_by(keys: Array, values: Array, count: int) -> Array:
    """The mean of the values with each key below `count`; NaN where there is none."""
    counts = np.bincount(keys, minlength=count)
    sums = np.bincount(keys, weights=values, minlength=count)
    with np.errstate(invalid="ignore"):
        means: Array = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return means


def medians_of(keys: Array, values: Array) -> Array:
    """For each row the median of the values with its key."""
    medians: Array = medians_by(keys, values, int(keys.max(initial=-1)) + 1)[keys]
    return medians


def means_of(keys: Array, values: Array) -> Array:
    """For each row the mean of the values with its key."""
    means: Array = means_by(keys, values, int(keys.max(initial=-1)) + 1)[keys]
    return means


def row_medians(values: Array, least: int = 1) -> Array:
    """The median of what is known of each row; NaN where fewer than `least` values are."""
    if not values.shape[1]:
        return np.full(len(values), np.nan)
    ordered = np.sort(values, axis=1)
    count = np.isfinite(ordered).sum(axis=1)
    each = np.arange(len(values))
    low, high = ordered[each, np.maximum(count - 1, 0) // 2], ordered[each, count // 2]
    medians: Array = np.where(count >= least, (low + high) / 2, np.nan)
    return medians


def middle_of_known(values: Array) -> Array:
    """The mean of the middle half of each row, of what is known of it; NaN where nothing is."""
    ordered = np.sort(values, axis=1)
    count = np.isfinite(ordered).sum(axis=1)
    cut = np.where(count > 3, count // 4, np.maximum(count - 1, 0) // 2)
    sums = np.cumsum(np.nan_to_num(ordered), axis=1, dtype=np.float64)
    sums = np.concatenate([np.zeros((len(values), 1)), sums], axis=1)
    each = np.arange(len(values))
    with np.errstate(invalid="ignore", divide="ignore"):
        middles: Array = (sums[each, count - cut] - sums[each, cut]) / (count - 2 * cut)
    return middles


def ordinals(keys: Array, times: Array | None = None) -> Array:
    """For each row how many rows before it, or earlier ones, have the same key."""
    if times is not None:
        by_time = np.argsort(times, kind="stable")
        ordered = np.empty(len(keys), dtype=np.int64)
        ordered[by_time] = ordinals(keys[by_time])
        return ordered
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order
    lengths = np.diff(np.r_[begins, len(keys)])
    counts = np.empty(len(keys), dtype=np.int64)
    counts[order] = np.arange(len(keys)) - np.repeat(begins, lengths)
    return counts
