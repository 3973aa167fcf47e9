"""The state of a rank's GPU, by a fake NVML that is held to the real module."""

import sys
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

import trainer_sdk
from tests.fakes.nvml import GPU_IS_LOST, RESET_REQUIRED, UNKNOWN, Card, FakeNvml
from trainer_sdk.device.gpu_state import GpuCheck, gpu_check

Install = Callable[..., FakeNvml]
CARDS = (Card("GPU-a"), Card("GPU-b"))


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def installed(*cards: Card, **fields: Any) -> FakeNvml:
        fake = FakeNvml(cards, **fields)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return installed


def test_a_rank_sees_its_own_gpu(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(*CARDS)
    assert gpu_check() == GpuCheck("ok", "NVML finds no fault", 0, "GPU-a")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert gpu_check().uuid == "GPU-b"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    assert gpu_check().uuid == "GPU-a"
    assert gpu_check(0).uuid == "GPU-b"
    assert fake.open_count == 0, "NVML is closed again"


@pytest.mark.parametrize(
    ("card", "state", "reason"),
    [
        (Card("GPU-a", recovery_action=1), "failed", "the driver asks for a reset"),
        (Card("GPU-a", recovery_action=2), "failed", "the driver asks for a reboot of the node"),
        (Card("GPU-a", recovery_action=6), "failed", "the driver asks for a reset of its bus"),
        (Card("GPU-a", recovery_action=7), "failed", "the driver asks for a reboot of the system"),
        (Card("GPU-a", recovery_action=5), "warning", "the driver asks for recovery action 5"),
        (Card("GPU-a", remapped=(0, 1, 0, 1)), "failed", "no spare rows of memory are left"),
        (Card("GPU-a", remapped=(0, 1, 1, 0)), "warning", "memory is repaired at the next reset"),
        (Card("GPU-a", remapped=(2, 1, 0, 0)), "ok", "NVML finds no fault; 3 rows remapped"),
        (Card("GPU-a", remapped=None, recovery_action=None), "ok", "NVML finds no fault"),
        (Card("GPU-a", broken={"nvmlDeviceGetUUID": GPU_IS_LOST}), "failed", "GPU is lost"),
        (Card("GPU-a", broken={"nvmlDeviceGetUUID": RESET_REQUIRED}), "failed", "restart"),
        (Card("GPU-a", broken={"nvmlDeviceGetUUID": UNKNOWN}), "unknown", "Unknown"),
    ],
)
def test_what_the_driver_says(install: Install, card: Card, state: str, reason: str) -> None:
    install(card)
    found = gpu_check()
    assert found.state == state
    assert reason.lower() in found.reason.lower()


def test_without_a_driver_there_is_no_gpu(install: Install) -> None:
    install(init_error=pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    found = gpu_check()
    assert (found.state, found.device, found.is_usable) == ("no_gpu", None, False)
    assert found.reason.startswith("no GPU")


def test_hidden_gpus_are_no_gpus(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(*CARDS)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_check().state == "no_gpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert gpu_check(1).state == "no_gpu"


def test_the_beginning_of_an_id_names_the_one_gpu_that_has_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA takes `GPU-8932f937`, where one GPU has it; NVML looks up whole ids only."""
    install(Card("GPU-8932f937-d72c"), Card("GPU-89aa0000-1111"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-89aa,GPU-8932f937-d72c,GPU-89")
    assert gpu_check(0).uuid == "GPU-89aa0000-1111"
    assert gpu_check(1).uuid == "GPU-8932f937-d72c"
    assert (gpu_check(2).state, gpu_check(2).is_usable) == ("unknown", True)
    assert "GPU-89 names 2 GPUs" in gpu_check(2).reason


def test_numbers_of_unlike_gpus_need_the_order_of_the_bus(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default CUDA's number 0 is the fastest, and NVML's the first on the bus."""
    install(Card("GPU-a", name="NVIDIA T4", recovery_action=1), Card("GPU-b"))
    assert gpu_check(0).state == "unknown"
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in gpu_check(0).reason
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert (gpu_check(0).state, gpu_check(1).uuid) == ("failed", "GPU-b")


def test_a_part_of_a_gpu_is_as_broken_as_the_gpu(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With MIG, CUDA sees parts, and NVML knows faults of the whole GPU only."""
    install(Card("GPU-a"), Card("GPU-b", parts=("MIG-1", "MIG-2"), recovery_action=1))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2,GPU-a")
    assert gpu_check(0) == GpuCheck("failed", "the driver asks for a reset", 0, "GPU-b")
    assert gpu_check(1).uuid == "GPU-a"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9")
    assert gpu_check(0).state == "unknown"


def test_a_call_never_raises(install: Install) -> None:
    install(*CARDS)
    found = gpu_check(7)
    assert (found.state, found.is_usable) == ("unknown", True)
    assert "IndexError" in found.reason


def test_the_name_is_the_function_of_the_package() -> None:
    assert trainer_sdk.gpu_check is gpu_check


@pytest.mark.gpu
def test_a_real_gpu_computes() -> None:
    pytest.importorskip("torch")
    assert gpu_check(0, computes=True).state in {"ok", "warning"}
