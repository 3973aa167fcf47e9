"""NVRx's scores of ranks, by its formulas.

Matrices have a row for each rank and a column for each section or kernel; NaN where a rank did not
run one. A score is in (0, 1], 1 is the best; 0.5 takes twice as long as the reference.
"""

from collections.abc import Sequence

import numpy as np

from everstep_services.straggler.domain.operations import Array

_COLLECTIVE_KERNEL = "ncclDev"


def lower_medians(rows: Array, columns: Array, values: Array, shape: tuple[int, int]) -> Array:
    """The lower median of the values of each cell of a matrix; NaN where there is none."""
    cells = rows.astype(np.int64) * shape[1] + columns
    order = np.lexsort((values, cells))
    counts = np.bincount(cells, minlength=shape[0] * shape[1])
    first = np.cumsum(counts) - counts
    medians = np.full(shape[0] * shape[1], np.nan)
    some = counts > 0
    medians[some] = values[order][(first + (counts - 1) // 2)[some]]
    return medians.reshape(shape)


def relative_section_scores(medians: Array) -> Array:
    """The fastest rank's median over the rank's own; NaN for what not every rank ran."""
    return _ratio(_common_minimum(medians), medians)


def individual_section_scores(medians: Array, best: Array) -> tuple[Array, Array]:
    """The rank's own best median over the one now, and the best from now on.

    `best` is NaN where there was none yet. A new best counts at once: its score is 1.
    """
    lowest = np.fmin(best, medians)
    return _ratio(lowest, medians), lowest


def relative_gpu_scores(
    medians: Array, counts: Array, averages: Array, kernels: Sequence[str]
) -> Array:
    """A score a rank, kernels weighted by the time they take.

    Kernels that not every rank ran count nothing, and neither do NCCL's; NaN if none is left.
    """
    own_kernels = _own_kernels(medians, kernels)
    return _weighted(_ratio(_common_minimum(own_kernels), own_kernels), counts * averages)


def individual_gpu_scores(
    medians: Array, counts: Array, averages: Array, kernels: Sequence[str], best: Array
) -> tuple[Array, Array]:
    """The same against the rank's own best medians, and the best from now on."""
    own_kernels = _own_kernels(medians, kernels)
    lowest = np.fmin(best, own_kernels)
    return _weighted(_ratio(lowest, own_kernels), counts * averages), lowest


def _own_kernels(medians: Array, kernels: Sequence[str]) -> Array:
    collective = np.array([_COLLECTIVE_KERNEL in name for name in kernels], dtype=bool)
    return np.where(collective, np.nan, medians)


def _common_minimum(medians: Array) -> Array:
    lowest: Array = np.min(medians, axis=0) if len(medians) else medians.sum(axis=0)
    return lowest  # NaN if any rank has none: that is NVRx's rule, too


def _ratio(reference: Array, medians: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios: Array = np.where(medians == 0, np.where(reference == 0, 1.0, np.nan),
                                 reference / medians)  # fmt: skip
    return ratios


def _weighted(scores: Array, weights: Array) -> Array:
    counted = np.isfinite(scores) & np.isfinite(weights)
    total = np.where(counted, weights, 0.0).sum(axis=1)
    summed = np.where(counted, scores * weights, 0.0).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        weighted: Array = np.where(total > 0, summed / total, np.nan)
    return weighted
