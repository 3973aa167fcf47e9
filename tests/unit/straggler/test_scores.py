"""NVRx's scores, held to its formulas written out in plain Python."""

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.straggler.domain import scores
from everstep_services.straggler.domain.operations import Array

NAN = math.nan
DURATIONS = st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=9)
KERNELS = ("gemm", "relu", "ncclDevKernel_AllReduce", "adam")
RANKS = st.lists(
    st.dictionaries(st.sampled_from(KERNELS), DURATIONS, max_size=4), min_size=1, max_size=5
)


def lower_median(values: list[float]) -> float:
    return sorted(values)[(len(values) - 1) // 2]


def matrix(ranks: list[dict[str, float]]) -> Array:
    return np.array([[rank.get(name, NAN) for name in KERNELS] for rank in ranks], dtype=float)


def oracle_gpu(kernels: dict[str, list[float]], references: dict[str, float]) -> float:
    """`sum_k (ref_k / MED_k * NUM_k * AVG_k) / sum_k (NUM_k * AVG_k)`; NaN without any."""
    total = weighted = 0.0
    for name, values in kernels.items():
        if name.startswith("ncclDev") or name not in references:
            continue
        weight = len(values) * (sum(values) / len(values))
        weighted += references[name] / statistics.median(values) * weight
        total += weight
    return weighted / total if total else NAN


def same(found: float, wanted: float) -> bool:
    return (math.isnan(found) and math.isnan(wanted)) or found == pytest.approx(wanted, rel=1e-12)


def test_sections_of_ranks_that_take_one_to_four_times_as_long() -> None:
    medians = np.array([[1.0], [2.0], [3.0], [4.0]])
    found = scores.relative_section_scores(medians)[:, 0]
    assert found.tolist() == [1, 1 / 2, 1 / 3, 1 / 4]


def test_a_section_that_a_rank_did_not_run_has_no_score_anywhere() -> None:
    found = scores.relative_section_scores(np.array([[1.0, 2.0], [NAN, 4.0]]))
    assert np.isnan(found[:, 0]).all()
    assert found[:, 1].tolist() == [1, 0.5]


@given(RANKS)
def test_relative_gpu_scores_are_the_formula(ranks: list[dict[str, list[float]]]) -> None:
    medians = [{k: statistics.median(v) for k, v in rank.items()} for rank in ranks]
    common = set(KERNELS).intersection(*ranks)
    references = {name: min(rank[name] for rank in medians) for name in common}
    found = scores.relative_gpu_scores(
        matrix(medians),
        matrix([{k: float(len(v)) for k, v in rank.items()} for rank in ranks]),
        matrix([{k: sum(v) / len(v) for k, v in rank.items()} for rank in ranks]),
        KERNELS,
    )
    for score, rank in zip(found, ranks, strict=True):
        assert same(float(score), oracle_gpu(rank, references))


@given(st.lists(RANKS, min_size=1, max_size=4))
def test_individual_scores_are_against_the_lowest_median_so_far(
    reports: list[list[dict[str, list[float]]]],
) -> None:
    count = max(map(len, reports))
    best = np.full((count, len(KERNELS)), NAN)
    lowest: list[dict[str, float]] = [{} for _ in range(count)]
    for report in reports:
        ranks = report + [{} for _ in range(count - len(report))]
        for rank, known in zip(ranks, lowest, strict=True):
            for name, values in rank.items():
                known[name] = min(known.get(name, math.inf), statistics.median(values))
        found, best = scores.individual_gpu_scores(
            matrix([{k: statistics.median(v) for k, v in rank.items()} for rank in ranks]),
            matrix([{k: float(len(v)) for k, v in rank.items()} for rank in ranks]),
            matrix([{k: sum(v) / len(v) for k, v in rank.items()} for rank in ranks]),
            KERNELS,
            best,
        )
        for score, rank, known in zip(found, ranks, lowest, strict=True):
            assert same(float(score), oracle_gpu(rank, known))


def test_individual_section_scores_keep_the_best() -> None:
    best = np.array([[NAN], [NAN]])
    found, best = scores.individual_section_scores(np.array([[2.0], [1.0]]), best)
    assert found[:, 0].tolist() == [1, 1]
    found, best = scores.individual_section_scores(np.array([[4.0], [0.5]]), best)
    assert found[:, 0].tolist() == [0.5, 1]
    found, best = scores.individual_section_scores(np.array([[NAN], [1.0]]), best)
    assert math.isnan(found[0, 0])
    assert (found[1, 0], best[:, 0].tolist()) == (0.5, [2.0, 0.5])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.floats(0, 10)), max_size=40))
def test_lower_medians_of_cells(rows: list[tuple[int, int, float]]) -> None:
    rank_of, name_of = (np.array([row[place] for row in rows], dtype=int) for place in (0, 1))
    values_of = np.array([row[2] for row in rows], dtype=float)
    found = scores.lower_medians(rank_of, name_of, values_of, (4, 3))
    for rank in range(4):
        for name in range(3):
            values = [row[2] for row in rows if row[:2] == (rank, name)]
            wanted = lower_median(values) if values else NAN
            assert found[rank, name] == pytest.approx(wanted, nan_ok=True)
