"""NVRx's detector: its scores, reports and interval (its rows 98 to 105)."""

import math
import statistics
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.nvrx.straggler import CallableId, Detector, ReportIntervalTracker
from trainer_sdk.nvrx.straggler_report import (
    Report,
    Statistic,
    StragglerId,
    kernel_summary,
    summary,
)
from trainer_sdk.testing import Watch, watched


@pytest.fixture
def watch() -> Iterator[Watch]:
    with watched() as watch:
        yield watch
    Detector.shutdown()


def section(*times_ms: float) -> Any:
    return {"compute": summary(times_ms, statistics.median_low, statistics.stdev)}


def kernel(name: str, median_us: float, count: int = 10) -> Any:
    figures = {"median_s": median_us * 1e-6, "average_s": median_us * 1e-6, "count": count}
    return {name: kernel_summary(figures)}


def detector_of(group: RankGroup, *, gathers: bool) -> Any:
    """A detector of its own for a rank that is a thread of this process."""

    class OneRank(Detector):
        pass

    OneRank.gather_on_rank0, OneRank._group = gathers, group
    OneRank._node, OneRank._best = f"node{group.rank // 2}", {}
    return OneRank


def reports(size: int, times: Sequence[Any], kernels: Sequence[Any], *, gathers: bool) -> Any:
    def rank(group: RankGroup) -> Any:
        detector = detector_of(group, gathers=gathers)
        return detector._report(times[group.rank], kernels[group.rank], 0.0)

    return together(size, rank)


def test_relative_scores_are_the_fastest_over_the_own() -> None:
    """Medians of (rank+1)x: 1, 1/2, 1/3, 1/4; collectives do not count."""
    times = [section(10.0 * (rank + 1)) for rank in range(4)]
    kernels = [
        kernel("gemm", 10.0 * (rank + 1)) | kernel("ncclDevKernel", 1000.0 / (rank + 1))
        for rank in range(4)
    ]
    first, *others = reports(4, times, kernels, gathers=True)
    assert others == [None, None, None]
    assert first.section_relative_perf_scores["compute"] == pytest.approx(
        {0: 1, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4}
    )
    assert first.gpu_relative_perf_scores == pytest.approx({0: 1, 1: 1 / 2, 2: 1 / 3, 3: 1 / 4})
    assert first.rank_to_node == {0: "node0", 1: "node0", 2: "node1", 3: "node1"}
    slow = first.identify_stragglers()
    assert slow["straggler_gpus_relative"] == {
        StragglerId(1, "node0"), StragglerId(2, "node1"), StragglerId(3, "node1")
    }  # fmt: skip
    assert set(slow["straggler_sections_relative"]) == {"compute"}
    assert slow["straggler_gpus_individual"] == set()
    assert slow["straggler_sections_individual"] == {}


def test_kernels_that_not_all_ranks_have_do_not_count() -> None:
    kernels = [kernel("common", 10.0 * (rank + 1)) | kernel(f"own{rank}", 5) for rank in range(2)]
    for rank, report in enumerate(reports(2, [{}, {}], kernels, gathers=False)):
        assert report.gpu_relative_perf_scores == pytest.approx({rank: 1 / (rank + 1)})
    kernels = [kernel("a", 10), kernel("b", 10)]
    for report in reports(2, [{}, {}], kernels, gathers=False):
        (score,) = report.gpu_relative_perf_scores.values()
        assert math.isnan(score)
        assert report.identify_stragglers()["straggler_gpus_relative"] == set()


def test_individual_scores_are_against_the_best_so_far() -> None:
    def rank(group: RankGroup) -> list[float]:
        detector = detector_of(group, gathers=False)
        scores = []
        for factor in (1.0, 1.25, 2.0, 0.5, 1.0):
            report = detector._report(section(10 * factor), kernel("gemm", 10 * factor), 0.0)
            assert report.gpu_individual_perf_scores == pytest.approx(
                report.section_individual_perf_scores["compute"]
            )
            scores += report.gpu_individual_perf_scores.values()
        return scores

    assert together(1, rank) == [pytest.approx([1, 0.8, 0.5, 1, 0.5])]


def test_the_interval_follows_the_typical_step_of_the_slowest_rank() -> None:
    """0.5 s are 50 iterations of the slowest rank, 10 ms each; long first ones do not matter."""

    def rank(group: RankGroup) -> int | None:
        tracker = ReportIntervalTracker(time_interval=0.5, group=group)
        now = 0.0
        for number in range(17):
            now += 5.0 if number < 3 else 0.005 * (group.rank + 1)
            tracker.iter_increase(now)
        assert not tracker.is_interval_elapsed()
        while not tracker.is_interval_elapsed():
            tracker.iter_increase(now)
        assert tracker.current_iter == tracker.iter_interval
        return tracker.iter_interval

    assert together(2, rank) == [50, 50]


def test_sections_are_measured_and_shown_to_the_agent(watch: Watch) -> None:
    Detector.initialize(profiling_interval=2, gather_on_rank0=False)
    for _ in range(4):
        with Detector.detection_section("compute", profile_cuda=False):
            pass
    report = Detector.generate_report()
    assert report is not None
    summary = report.local_section_summaries["compute"]
    assert summary[Statistic.NUM] == 2
    assert watch.sections["compute"].count == 4
    assert report.section_relative_perf_scores["compute"] == {0: 1.0}
    assert report.local_kernel_summaries == {}
    empty = Detector.generate_report()
    assert isinstance(empty, Report)
    assert empty.section_relative_perf_scores == {}


def test_functions_are_wrapped_and_restored(watch: Watch) -> None:
    model = SimpleNamespace(forward=lambda number: number + 1)
    original = model.forward
    Detector.initialize(report_time_interval=0)
    Detector.wrap_callables([CallableId(model, "forward")])
    made = [Detector.generate_report_if_interval_elapsed() for _ in range(18) if model.forward(1)]
    assert any(made)
    Detector.shutdown()
    assert model.forward is original
    assert watch.sections["SimpleNamespace.forward"].count == 18


def test_misuse_is_an_error_with_its_remedy(watch: Watch) -> None:
    with pytest.raises(RuntimeError, match=r"call Detector\.initialize\(\) before"):
        Detector.generate_report()
    with pytest.raises(TypeError, match=r"call Detector\.initialize\(\)"):
        Detector()
    with pytest.raises(ValueError, match="scores_to_compute has {'x'}"):
        Detector.initialize(scores_to_compute=["x"])
    Detector.initialize()
    with pytest.raises(RuntimeError, match=r"call Detector\.shutdown\(\) first"):
        Detector.initialize()
    with Detector.detection_section("twice"):
        pass
    with pytest.raises(ValueError, match="section 'twice' is at"), \
            Detector.detection_section("twice"):  # fmt: skip
        pass
