"""What the check of GPUs says of cards of all kinds, by a fake NVML."""

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.gpu.probe import GpuProbe
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination
from tests.fakes import nvml as fakes
from tests.fakes.nvml import Card, FakeNvml

_THERMAL = pynvml.nvmlClocksEventReasonHwThermalSlowdown | pynvml.nvmlClocksEventReasonHwSlowdown


class Node:
    """One node that is looked at again and again; its notes go through JSON, as on disk."""

    def __init__(self, root: Path, nvml: FakeNvml, **settings: Any) -> None:
        self.root, self.nvml = root, nvml
        self.settings = ChecksSettings(**settings)
        self.memory: dict[str, Any] = {}
        self.own_pids: frozenset[int] = frozenset()
        self.reboot("first")

    def reboot(self, boot: str) -> None:
        path = self.root / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(boot)

    def change(self, index: int = 0, **changed: Any) -> None:
        cards = list(self.nvml.cards)
        cards[index] = cards[index].but(**changed)
        self.nvml.cards = cards

    def look(self) -> list[CheckResult]:
        look = Look(
            self.settings, root=self.root, memory=self.memory, own_pids=self.own_pids, at=1000.0
        )
        found = list(GpuProbe(lambda: self.nvml).examine(look))
        self.memory = json.loads(json.dumps(look.memory))
        return found

    def trouble(self) -> CheckResult:
        """The only result that is not `ok`."""
        (found,) = (result for result in self.look() if result.state != "ok")
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path, FakeNvml([Card("GPU-0")]))


@pytest.mark.parametrize("profile", fakes.PROFILES)
def test_a_healthy_card_of_any_kind_is_ok_however_often_it_is_looked_at(
    profile: str, tmp_path: Path
) -> None:
    """PCIe, HGX, NVL72, MIG, an old driver and missing values (A10.2)."""
    node = Node(tmp_path, fakes.PROFILES[profile]())
    for _ in range(3):
        assert {result.state for result in node.look()} == {"ok"}
        assert node.nvml.open_count == 0
    assert [result.subject for result in node.look()] == [card.uuid for card in node.nvml.cards]


def test_without_the_package_the_check_is_unsupported() -> None:
    def load() -> Any:
        raise ImportError("No module named 'pynvml'")

    (found,) = GpuProbe(load).examine(Look(ChecksSettings()))
    assert (found.state, found.failure_class) == ("unsupported", "")
    assert "pip install" in found.reason


@pytest.mark.parametrize(
    ("error", "state", "failure_class"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "unsupported", ""),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "unsupported", ""),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "failed", "reboot"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, "failed", "reboot"),
        (pynvml.NVML_ERROR_UNKNOWN, "unknown", ""),
    ],
)
def test_an_nvml_that_does_not_open_says_why(error: int, state: str, failure_class: str) -> None:
    (found,) = GpuProbe(lambda: FakeNvml(init_error=error)).examine(Look(ChecksSettings()))
    assert (found.state, found.failure_class) == (state, failure_class)


def test_a_node_without_gpus_is_unsupported_unless_some_are_expected(tmp_path: Path) -> None:
    assert [r.state for r in Node(tmp_path, FakeNvml()).look()] == ["unsupported"]
    expecting = Node(tmp_path, FakeNvml(), gpus_expected=8)
    assert expecting.trouble().reason.startswith("0 of 8 GPUs are present")
    away = Node(tmp_path, FakeNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED), gpus_expected=8)
    assert away.trouble().state == "unknown"


@pytest.mark.parametrize(
    ("action", "state", "failure_class"),
    [
        (pynvml.NVML_GPU_RECOVERY_ACTION_GPU_RESET, "failed", "reset"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_NODE_REBOOT, "failed", "reboot"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_P2P, "failed", "drain"),
        (pynvml.NVML_GPU_RECOVERY_ACTION_DRAIN_AND_RESET, "failed", "drain"),
        (99, "warning", "report"),
    ],
)
def test_the_driver_says_what_it_needs(
    node: Node, action: int, state: str, failure_class: str
) -> None:
    node.change(recovery_action=action)
    found = node.trouble()
    assert (found.state, found.failure_class) == (state, failure_class)
    assert found.code.startswith("GPU_RECOVERY_ACTION=")
    node.change(recovery_action=0)
    assert node.look()[0].state == "ok"


@pytest.mark.parametrize(
    ("error", "failure_class"), [(fakes.GPU_IS_LOST, "reboot"), (fakes.RESET_REQUIRED, "reset")]
)
@pytest.mark.parametrize("asked", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetTotalEccErrors"])
def test_a_gpu_that_does_not_answer_has_failed_once(
    tmp_path: Path, asked: str, error: int, failure_class: str
) -> None:
    node = Node(tmp_path, fakes.hgx())
    node.look()
    node.change(3, broken={asked: error})
    for _ in range(2):
        found = node.trouble()
        assert (found.state, found.failure_class) == ("failed", failure_class)
        assert "GPU 3" in found.reason


def test_what_cannot_be_read_for_no_known_reason_is_unknown(node: Node) -> None:
    node.change(broken={"nvmlDeviceGetTemperatureV": fakes.UNKNOWN})
    found = node.trouble()
    assert found.state == "unknown"
    assert "nvmlDeviceGetTemperatureV: Unknown Error" in found.reason


def test_a_gpu_that_was_there_has_failed_until_it_is_back_or_the_node_is_another(
    tmp_path: Path,
) -> None:
    node = Node(tmp_path, fakes.hgx())
    node.look()
    everybody = list(node.nvml.cards)
    node.nvml.cards = everybody[:5] + everybody[6:]
    for _ in range(2):
        found = node.trouble()
        assert (found.state, found.failure_class) == ("failed", "reboot")
        assert found.subject == everybody[5].uuid
    node.nvml.cards = everybody
    assert {result.state for result in node.look()} == {"ok"}
    node.nvml.cards = everybody[:4]
    node.reboot("second")  # another boot, or another allocation, may have been given fewer
    assert {result.state for result in node.look()} == {"ok"}


def test_fewer_than_are_expected_have_failed_from_the_first_look_on(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.nvl72(), gpus_expected=8)
    assert node.trouble().reason == "4 of 8 GPUs are present (gpus_expected); reboot the node"


def test_errors_of_memory_that_the_driver_has_contained_are_a_warning_once(node: Node) -> None:
    node.look()
    node.change(ecc=(2, 7))
    found = node.trouble()
    assert (found.state, found.failure_class) == ("warning", "watch")
    assert "7 more uncorrectable" in found.reason
    assert node.look()[0].state == "ok"


def test_an_old_driver_cannot_contain_errors_so_they_fail_until_a_reset(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.old_driver())
    node.change(ecc=(2, 7))
    for _ in range(3):
        found = node.trouble()
        assert (found.state, found.failure_class) == ("failed", "reset")
    node.change(ecc=(0, 7))
    assert node.look()[0].state == "ok"


@pytest.mark.parametrize(
    ("changed", "state", "failure_class"),
    [
        ({"remapped": (0, 9, 0, 1)}, "failed", "replace"),
        ({"remapped": (0, 1, 1, 0)}, "warning", "reset"),
        ({"retired_pending": True}, "warning", "reset"),
        ({"sram_threshold": True}, "failed", "replace"),
    ],
)
def test_broken_memory_is_told_by_what_is_left_of_its_spares(
    node: Node, changed: dict[str, Any], state: str, failure_class: str
) -> None:
    node.change(**changed)
    found = node.trouble()
    assert (found.state, found.failure_class) == (state, failure_class)


def test_rows_that_were_replaced_since_the_last_look_are_worth_watching(node: Node) -> None:
    node.look()
    node.change(remapped=(5, 2, 0, 0))
    assert "2 more rows" in node.trouble().reason
    assert node.look()[0].state == "ok"


def test_heat_is_a_warning_first_and_a_failure_when_it_stays(node: Node) -> None:
    node.change(event_reasons=_THERMAL, temperature=88)
    said = [node.trouble() for _ in range(3)]
    assert [found.state for found in said] == ["warning", "warning", "failed"]
    assert said[0].reason == (
        "GPU 0: slowed down by heat (hardware), 1 times in a row (limit 3): 88 °C; it slows down "
        "at 87 °C"
    )
    node.change(event_reasons=0, temperature=60)
    assert node.look()[0].state == "ok"
    node.change(event_reasons=_THERMAL)
    assert node.trouble().state == "warning"


@pytest.mark.parametrize(
    "reasons", [pynvml.nvmlClocksEventReasonSwPowerCap, pynvml.nvmlClocksEventReasonGpuIdle]
)
def test_a_power_limit_or_idleness_is_fine(node: Node, reasons: int) -> None:
    node.change(event_reasons=reasons)
    assert node.look()[0].state == "ok"


@pytest.mark.parametrize(
    ("own_limit", "set_limit", "temperature", "state"),
    [
        (87, None, 82, "ok"),
        (87, None, 83, "warning"),
        (None, None, 99, "ok"),
        (None, 80.0, 81, "warning"),
        (87, 70.0, 71, "warning"),
        (87, 95.0, 90, "ok"),
    ],
)
def test_hot_is_measured_against_the_cards_own_limit(
    tmp_path: Path, own_limit: int | None, set_limit: float | None, temperature: int, state: str
) -> None:
    card = Card("GPU-0", slowdown_at=own_limit, temperature=temperature)
    node = Node(tmp_path, FakeNvml([card]), gpu_temperature_warning_c=set_limit)
    assert node.look()[0].state == state


_STRANGER = (4711, 40 * fakes.GIB)


def test_memory_of_strangers_is_named_and_harms_nobody(node: Node) -> None:
    node.change(processes=(_STRANGER, (4712, fakes.GIB)))
    found = node.trouble()
    assert (found.state, found.failure_class) == ("warning", "report")
    assert "process 4711, process 4712 holds 41984 MiB (limit 1024 MiB)" in found.reason


def test_ranks_of_ours_are_no_strangers_and_little_memory_is_nobody(node: Node) -> None:
    node.own_pids = frozenset({17})
    node.change(processes=((17, 70 * fakes.GIB), (4711, fakes.GIB)))
    assert {result.state for result in node.look()} == {"ok"}
    node.change(processes=((17, 70 * fakes.GIB), _STRANGER))
    assert "process 4711 holds" in node.trouble().reason


@pytest.mark.parametrize("pid", [0, 930_001])
def test_in_another_pid_namespace_ranks_of_ours_may_look_like_strangers(
    node: Node, pid: int
) -> None:
    node.own_pids = frozenset({17})
    node.change(processes=((pid, 70 * fakes.GIB),))
    assert {result.state for result in node.look()} == {"ok"}
    node.own_pids = frozenset()
    assert node.trouble().state == "warning"


_FABRIC_SLOW = pynvml.NVML_GPU_FABRIC_HEALTH_MASK_DEGRADED_BW_TRUE
_FABRIC_ROUTE = (
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_ROUTE_UNHEALTHY_TRUE
    << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_ROUTE_UNHEALTHY
)
_FABRIC_WRONG = (
    pynvml.NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_NO_PARTITION
    << pynvml.NVML_GPU_FABRIC_HEALTH_MASK_SHIFT_INCORRECT_CONFIGURATION
)


@pytest.mark.parametrize(
    ("fabric", "state", "failure_class"),
    [
        ((pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED, 0, 0), "ok", ""),
        ((pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0, 0), "warning", "report"),
        ((pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, fakes.UNKNOWN, 0), "failed", "reset"),
        ((pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, _FABRIC_SLOW), "warning", "watch"),
        ((pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, _FABRIC_ROUTE), "failed", "drain"),
        ((pynvml.NVML_GPU_FABRIC_STATE_COMPLETED, 0, _FABRIC_WRONG), "warning", "report"),
    ],
)
def test_the_fabric_counts_where_there_is_one(
    node: Node, fabric: tuple[int, int, int], state: str, failure_class: str
) -> None:
    node.change(fabric=fabric)
    (found,) = node.look()
    assert (found.state, found.failure_class) == (state, failure_class)


def test_what_is_only_worth_knowing_is_said_of_a_gpu_that_is_ok(node: Node) -> None:
    node.change(mig=True, persistence=False)
    (found,) = node.look()
    assert found.state == "ok"
    assert found.reason.startswith("GPU 0: MIG is on; persistence mode is off")


def test_the_nvlink_domain_is_the_cluster_of_the_fabric(tmp_path: Path) -> None:
    """The name is that of `--group @nvlink`; zeros stand for a fabric of this node alone."""
    rack, board = Node(tmp_path, fakes.nvl72()), Node(tmp_path, fakes.hgx())
    assert {found.nvlink_domain for found in rack.look()} == {f"nvlink-{fakes.NVL72_CLUSTER}"}
    assert {found.nvlink_domain for found in board.look()} == {""}


def test_a_gpu_that_has_not_joined_its_fabric_is_in_no_domain(tmp_path: Path) -> None:
    rack = Node(tmp_path, fakes.nvl72())
    rack.change(fabric=(pynvml.NVML_GPU_FABRIC_STATE_IN_PROGRESS, 0, 0))
    domains = [found.nvlink_domain for found in rack.look()]
    assert domains.count("") == 1
    done = NodeExamination("join", ("gpu",), tuple(rack.look()), 0.1)
    assert done.nvlink_domain == f"nvlink-{fakes.NVL72_CLUSTER}", "the others agree"


def test_gpus_of_two_domains_have_none(tmp_path: Path) -> None:
    rack = Node(tmp_path, fakes.nvl72())
    rack.change(cluster=bytes(range(16)))
    assert NodeExamination("join", ("gpu",), tuple(rack.look()), 0.1).nvlink_domain == ""
