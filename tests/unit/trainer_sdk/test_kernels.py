"""Durations of kernels are collected if CUPTI is there, without an effect otherwise (A6.6)."""

import json
import sys
from collections.abc import Callable
from math import isclose
from pathlib import Path
from types import ModuleType

import pytest

from tests.fakes.cupti import ActivityKind, Cupti, Kernel
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.device.kernels import KERNELS_MOST, NAME_MOST, REPORTED_MOST, KernelTrace

Install = Callable[[Cupti | None], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    def put(cupti: Cupti | None) -> None:
        package = ModuleType("cupti")
        if cupti is not None:
            package.cupti = cupti  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cupti", package)

    return put


def kernel(name: str, took_us: float, **sizes: int) -> Kernel:
    return Kernel(name, 1_000, 1_000 + round(took_us * 1000), **sizes)


def test_figures_are_those_of_nvrx(install: Install, tmp_path: Path) -> None:
    cupti = Cupti()
    install(cupti)
    trace = KernelTrace(str(tmp_path), every_s=3600)
    assert trace.start()
    assert cupti.enabled == {ActivityKind.CONCURRENT_KERNEL}
    assert cupti.buffer == (8 << 20, 0)
    cupti.ran(*(kernel("gemm", took) for took in (10, 40, 20, 30)), kernel("gemm", 5, grid_x=9))
    cupti.activity_flush_all(1)
    most, least = trace.statistics()
    assert (most["kernel"], most["count"]) == ("gemm <128,1,1> [4,1,1]", 4)
    assert isclose(most["median_s"], 25e-6), "the mean of both middle values"
    assert isclose(most["average_s"], 25e-6)
    assert least["kernel"] == "gemm <128,1,1> [9,1,1]", "another grid is another kernel"
    assert trace.statistics() == [], "a window's figures are reported once"
    trace.stop()
    assert not cupti.enabled


def test_kernel_figures_are_written_for_the_agent(install: Install, tmp_path: Path) -> None:
    cupti = Cupti()
    install(cupti)
    trace = KernelTrace(str(tmp_path), every_s=3600)
    trace.start()
    cupti.ran(kernel("gemm", 10))
    cupti.activity_flush_all(0)
    trace.write()
    trace.stop()
    (told,) = json.loads((tmp_path / layout.KERNELS_FILE).read_text())
    assert told["kernel"].startswith("gemm ")
    assert (told["count"], told["median_s"]) == (1, 10e-6)


def test_kernel_figures_are_written_at_intervals(install: Install, tmp_path: Path) -> None:
    install(Cupti())
    trace = KernelTrace(str(tmp_path), every_s=0.01)
    trace.start()
    until((tmp_path / layout.KERNELS_FILE).exists, "they are written")
    trace.stop()


@pytest.mark.parametrize("has_driver", [True, False], ids=["no-package", "no-driver"])
def test_without_cupti_kernels_are_not_traced(
    install: Install, tmp_path: Path, has_driver: bool
) -> None:
    install(None if has_driver else Cupti(has_driver=False))
    trace = KernelTrace(str(tmp_path))
    assert not trace.start()
    assert trace.reason
    trace.stop()
    assert trace.statistics() == []


def test_impossible_records_are_counted(install: Install, tmp_path: Path) -> None:
    cupti = Cupti()
    install(cupti)
    trace = KernelTrace(str(tmp_path), every_s=3600)
    trace.start()
    cupti.ran(object(), kernel("backwards", -5), kernel("good", 5))
    cupti.activity_flush_all(0)
    assert trace.dropped == 2
    assert len(trace.statistics()) == 1
    trace.stop()


def test_a_kernel_trace_is_bounded(install: Install, tmp_path: Path) -> None:
    cupti = Cupti()
    install(cupti)
    trace = KernelTrace(str(tmp_path), every_s=3600)
    trace.start()
    names = [f"{number}{'x' * 500}" for number in range(KERNELS_MOST + 10)]
    cupti.ran(*(kernel(name, 5) for name in names))
    cupti.activity_flush_all(0)
    figures = trace.statistics()
    assert len(figures) == REPORTED_MOST
    assert trace.dropped == 10
    assert max(len(one["kernel"]) for one in figures) <= NAME_MOST
    trace.stop()


@pytest.mark.gpu
def test_kernels_of_a_real_gpu_are_traced(tmp_path: Path) -> None:
    """With `cupti-python` installed (A6.6)."""
    torch = pytest.importorskip("torch")
    trace = KernelTrace(str(tmp_path), every_s=3600)
    assert trace.start(), trace.reason
    matrix = torch.randn(1024, 1024, device="cuda")
    for _ in range(50):
        matrix = torch.tanh(matrix @ matrix)
    torch.cuda.synchronize()
    from cupti import cupti

    cupti.activity_flush_all(1)
    figures = trace.statistics()
    trace.stop()
    assert {one["count"] for one in figures} >= {50}
    assert all(one["median_s"] > 0 for one in figures)
