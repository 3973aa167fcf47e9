"""The checks of in-process restart ask the node: NVML for GPUs and links, sysfs for ports."""

import sys
from pathlib import Path

import pynvml
import pytest

from tests.fakes.nvml import GPU_IS_LOST, Card, FakeNvml
from trainer_sdk.nvrx.inprocess.node_checks import (
    ChainedGPUHealthCheck,
    ChainedNicHealthCheck,
    ChainedNVLHealthCheck,
)
from trainer_sdk.nvrx.inprocess.state import FrozenState, HealthCheckError, State

STATE: FrozenState = State(0, 2).freeze()


@pytest.fixture(autouse=True)
def first_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("LOCAL_RANK", "0")


def install(monkeypatch: pytest.MonkeyPatch, card: Card) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml((card,)))


def test_a_gpu_that_the_driver_gives_up_takes_part_in_no_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = ChainedGPUHealthCheck()
    install(monkeypatch, Card("GPU-a"))
    assert check(STATE) is STATE
    install(monkeypatch, Card("GPU-a", recovery_action=1))
    with pytest.raises(HealthCheckError, match="GPU 0: the driver asks for a reset"):
        check(STATE)
    install(monkeypatch, Card("GPU-a", broken={"nvmlDeviceGetUUID": GPU_IS_LOST}))
    with pytest.raises(HealthCheckError, match="(?i)lost"):
        check(STATE)


def test_a_link_that_goes_away_is_noticed_and_one_that_never_was_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check = ChainedNVLHealthCheck()
    install(monkeypatch, Card("GPU-a", links={0: 1, 1: 1, 2: 0}))
    assert check(STATE) is STATE
    install(monkeypatch, Card("GPU-a", links={0: 1, 1: 0, 2: 0}))
    with pytest.raises(HealthCheckError, match="NVLink 1 of the GPU is not active any more"):
        check(STATE)


def test_a_link_that_sleeps_to_save_power_has_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU's links sleep: NVML's state is then "disabled", and its field says why."""
    check = ChainedNVLHealthCheck()
    install(monkeypatch, Card("GPU-a", links={0: 1, 1: 1}))
    assert check(STATE) is STATE
    asleep = {(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, 1): pynvml.NVML_NVLINK_STATE_SLEEP}
    install(monkeypatch, Card("GPU-a", links={0: 1, 1: 0}, link_fields=asleep))
    assert check(STATE) is STATE


class Ports:
    """A GPU and two adapters; the first shares a bridge with the GPU."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pci, self.infiniband = folder / "pci", folder / "infiniband"
        bridge, other = folder / "root/0000:17/0000:18", folder / "root/0000:98/0000:99"
        for place in (self.pci, self.infiniband, bridge / "gpu", bridge / "near", other / "far"):
            place.mkdir(parents=True)
        (self.pci / "0000:18:00.0").symlink_to(bridge / "gpu")
        for name, device in (("mlx5_0", bridge / "near"), ("mlx5_1", other / "far")):
            (self.infiniband / name / "ports/1/counters").mkdir(parents=True)
            (self.infiniband / name / "device").symlink_to(device)
            self.show(name)

    def show(self, name: str, state: str = "4: ACTIVE", downs: int = 0) -> None:
        port = self.infiniband / name / "ports/1"
        (port / "state").write_text(f"{state}\n")
        (port / "counters/link_downed").write_text(f"{downs}\n")


def test_the_port_next_to_the_gpu_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Card("GPU-a"))
    ports = Ports(tmp_path)
    check = ChainedNicHealthCheck(pci=ports.pci, infiniband=ports.infiniband)
    assert check(STATE) is STATE
    ports.show("mlx5_1", "1: DOWN", downs=1)
    assert check(STATE) is STATE, "another GPU's"
    ports.show("mlx5_0", downs=1)
    with pytest.raises(HealthCheckError, match="port 1 of mlx5_0 has lost its link"):
        check(STATE)
    assert check(STATE) is STATE, "it is back, and has not been down since"
    ports.show("mlx5_0", "1: DOWN", downs=1)
    with pytest.raises(HealthCheckError):
        check(STATE)


def test_a_node_without_gpus_or_ports_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for check in (
        ChainedGPUHealthCheck(),
        ChainedNVLHealthCheck(),
        ChainedNicHealthCheck(infiniband=tmp_path),
    ):
        assert check(STATE) is STATE
