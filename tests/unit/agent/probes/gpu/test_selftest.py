"""What the self-test of GPUs says; its arithmetic runs for real, on the processor."""

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.gpu import exercise
from everstep_services.agent.probes.gpu.selftest import GpuSelfTestProbe, verdicts
from everstep_services.agent.probes.settings import ChecksSettings

_BEGAN = {"began": ["cuda:0", "cuda:1", "cuda:2"]}


def _done(index: int, **changed: Any) -> dict[str, Any]:
    good = {"tflops": 700.0, "gib_s": 2000.0, "tested_mib": 8192, "wrong": "", "name": "H100"}
    return {"device": f"cuda:{index}", **good, **changed}


def _states(*lines: dict[str, Any], trouble: str = "", late_s: float | None = None) -> list[str]:
    return [
        f"{found.subject} {found.state} {found.failure_class}".strip()
        for found in verdicts(lines, trouble, late_s)
    ]


def test_right_results_are_ok_with_their_figures() -> None:
    found = list(verdicts([_BEGAN, *map(_done, range(3))], ""))
    assert [result.state for result in found] == ["ok"] * 3
    assert found[0].reason == "700.0 TFLOP/s in bfloat16, 2000 GiB/s, 8192 MiB tested"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"wrong": "a product was wrong"}, "cuda:1 failed replace"),
        ({"error": "CUDA error: uncorrectable ECC error encountered"}, "cuda:1 failed reset"),
        ({"full": "CUDA out of memory."}, "cuda:1 unknown"),
        ({"tflops": 400.0}, "cuda:1 warning watch"),
        ({"gib_s": 1000.0}, "cuda:1 warning watch"),
        ({"tflops": 400.0, "name": "T4"}, "cuda:1 ok"),
    ],
)
def test_one_gpu_among_others_is_told_apart(changed: dict[str, Any], said: str) -> None:
    lines = [_BEGAN, _done(0), _done(1, **changed), _done(2)]
    assert _states(*lines) == ["cuda:0 ok", said, "cuda:2 ok"]


def test_a_gpu_that_does_not_answer_hangs_and_those_after_it_are_unknown() -> None:
    at = {"at": "cuda:1", "after_s": 20.0}
    said = _states(_BEGAN, _done(0), at, trouble="it did not end within 85 s", late_s=85.0)
    assert said == ["cuda:0 ok", "cuda:1 failed reset", "cuda:2 unknown"]


def test_a_slow_start_or_an_early_end_is_no_failure_of_a_gpu() -> None:
    at = {"at": "cuda:0", "after_s": 80.0}
    assert _states(_BEGAN, at, trouble="late", late_s=85.0) == [
        f"cuda:{index} unknown" for index in range(3)
    ]
    assert _states(_BEGAN, _done(0), trouble="killed")[1:] == ["cuda:1 unknown", "cuda:2 unknown"]
    assert _states(trouble="it did not end", late_s=85.0) == ["unknown"]
    assert _states({"missing": "torch sees no CUDA device"}) == ["unsupported"]


def test_the_exercise_runs_in_a_process_of_its_own_and_is_right() -> None:
    look = Look(ChecksSettings(selftest_s=0.1))
    (found,) = GpuSelfTestProbe(["cpu"]).examine(look)
    assert (found.subject, found.state) == ("cpu", "ok")
    assert "8 MiB tested" in found.reason


def _raise(error: Exception) -> Any:
    raise error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("CUDA error: an illegal memory access\nhints"), "error"),
        (torch.cuda.OutOfMemoryError("CUDA out of memory. Tried\nhints"), "full"),
    ],
)
def test_what_a_device_says_is_told_in_one_line(error: Exception, said: str) -> None:
    broken = _Wrong(empty=lambda *_, **__: _raise(error))
    found = exercise._exercised(broken, "cpu", 0.1)
    assert found[said] == str(error).splitlines()[0]


class _Wrong:
    """A GPU that gets something wrong: torch, but for one function."""

    def __init__(self, **functions: Any) -> None:
        self._functions = functions

    def __getattr__(self, name: str) -> Any:
        return self._functions.get(name) or getattr(torch, name)


def test_memory_that_does_not_keep_what_was_written_is_found() -> None:
    def empty_like(tensor: torch.Tensor) -> Any:
        return _Leaky(torch.empty_like(tensor))

    class _Leaky:
        def __init__(self, tensor: torch.Tensor) -> None:
            self._tensor = tensor

        def copy_(self, other: torch.Tensor) -> None:
            self._tensor.copy_(other)
            self._tensor[12345] ^= 0x10

        def __ne__(self, pattern: object) -> Any:
            return self._tensor != pattern

        __hash__ = None  # type: ignore[assignment]

    found = exercise._memory(_Wrong(empty_like=empty_like), torch.device("cpu"), 0.1)
    assert found["wrong"] == "1 of 8388608 bytes of memory were not 0x00 when read"


def test_a_product_that_differs_in_one_bit_in_a_later_round_is_found() -> None:
    calls = []

    def mm(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        torch.mm(a, b, out=out)
        calls.append(1)
        if len(calls) == 2:
            out[3, 5] += 1

    found = exercise._matrices(_Wrong(mm=mm), torch.device("cpu"), 5.0)
    assert found == {"wrong": "the same product had another result in round 2"}


def test_a_product_that_is_wrong_each_time_is_found_by_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right, vectors, expected = exercise._problem(torch, 256)
    one_less = left.clone()
    one_less[7, 7] += 1
    monkeypatch.setattr(
        exercise, "_problem", lambda torch, size: (one_less, right, vectors, expected)
    )
    found = exercise._matrices(torch, torch.device("cpu"), 0.1)
    assert found == {"wrong": "a product of two 256 × 256 matrices was wrong"}


@pytest.mark.gpu
def test_a_real_gpu_passes_with_a_plausible_speed(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    look = Look(ChecksSettings(selftest_s=2.0), root=tmp_path)
    for found in GpuSelfTestProbe().examine(look):
        assert found.state == "ok", found.reason
        assert float(found.reason.split()[0]) > 1
