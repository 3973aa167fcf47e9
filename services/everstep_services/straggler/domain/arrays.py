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


def ordinals(keys: Array) -> Array:
    """For each row how many rows before it have the same key."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(keys) else order
    lengths = np.diff(np.r_[begins, len(keys)])
    counts = np.empty(len(keys), dtype=np.int64)
    counts[order] = np.arange(len(keys)) - np.repeat(begins, lengths)
    return counts
