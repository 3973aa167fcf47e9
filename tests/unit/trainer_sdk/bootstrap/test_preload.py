"""Which open devices make a fork unsafe: CUDA's do, and NVML's way to count devices does not."""

import ctypes
import os
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sdk.bootstrap import preload


@pytest.mark.parametrize(
    ("opened", "reason"),
    [
        (["/dev/null"], ""),
        (["/dev/nvidiactl"], ""),  # NVML, by `torch.cuda.is_available()`
        (["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0"], "it has opened /dev/nvidia-uvm"),
        (["/dev/nvidiactl", "/dev/nvidia0"], "it has opened /dev/nvidia0"),
        (["/dev/kfd"], "it has opened /dev/kfd"),
    ],
)
def test_devices_that_a_module_opens_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, opened: list[str], reason: str
) -> None:
    monkeypatch.setattr(preload, "_open_files", lambda: iter(opened))
    monkeypatch.setattr("os.listdir", lambda _: ["the only thread"])
    assert preload.why_unsafe() == reason


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(3, ""), (0, "CUDA is initialised in it"), (100, "CUDA is initialised in it")],
)
def test_a_module_that_starts_the_driver_when_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, answer: int, reason: str
) -> None:
    """torch does not know of a `cuInit` by others, which leaves CUDA unusable after a fork."""

    def loaded(name: str, mode: int) -> Any:
        assert name == "libcuda.so.1"
        assert mode & os.RTLD_NOLOAD, "the check must not load the driver"
        return SimpleNamespace(cuDeviceGetCount=lambda _count: answer)

    monkeypatch.setattr(ctypes, "CDLL", loaded)
    monkeypatch.setattr(preload, "_open_files", lambda: iter(()))
    monkeypatch.setattr("os.listdir", lambda _: ["the only thread"])
    assert preload.why_unsafe() == reason
