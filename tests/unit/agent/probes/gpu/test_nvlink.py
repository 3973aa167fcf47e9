"""What the check of NVLinks says, by a fake NVML."""

import json
from pathlib import Path
from typing import Any

import pynvml
import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.gpu.nvlink import NvlinkProbe
from everstep_services.agent.probes.settings import ChecksSettings
from tests.fakes import nvml as fakes
from tests.fakes.nvml import Card, FakeNvml

_UP, _DOWN = pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_FEATURE_DISABLED
_EVERY_S = 60.0


class Node:
    """One node that is looked at once a minute."""

    def __init__(self, root: Path, nvml: FakeNvml, **settings: Any) -> None:
        self.root, self.nvml = root, nvml
        self.settings = ChecksSettings(**settings)
        self.memory: dict[str, Any] = {}
        self.at = 1e9
        self.reboot("first")

    def reboot(self, boot: str) -> None:
        path = self.root / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(boot)

    def change(self, index: int, **changed: Any) -> Card:
        cards = list(self.nvml.cards)
        cards[index] = cards[index].but(**changed)
        self.nvml.cards = cards
        return cards[index]

    def look(self) -> list[CheckResult]:
        self.at += _EVERY_S
        look = Look(self.settings, root=self.root, memory=self.memory, at=self.at)
        found = list(NvlinkProbe(lambda: self.nvml).examine(look))
        self.memory = json.loads(json.dumps(look.memory))
        return found

    def troubles(self) -> list[CheckResult]:
        return [result for result in self.look() if result.state not in ("ok", "unsupported")]


@pytest.mark.parametrize(
    ("profile", "states"),
    [
        ("pcie", ["unsupported"] * 2),
        ("hgx", ["ok"] * 8),
        ("nvl72", ["ok"] * 4),
        ("mig", ["unsupported"]),
        ("no-nvlink", ["unsupported"]),
        ("old-driver", ["unsupported"]),
        ("not-available", ["unsupported"]),
    ],
)
def test_no_card_fails_for_links_that_it_does_not_have(
    tmp_path: Path, profile: str, states: list[str]
) -> None:
    """Cards without links are unsupported, and never failed (A10.2)."""
    node = Node(tmp_path, fakes.PROFILES[profile]())
    for _ in range(3):
        assert [result.state for result in node.look()] == states


def test_without_a_driver_the_check_is_unsupported() -> None:
    nvml = FakeNvml(init_error=pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    (found,) = NvlinkProbe(lambda: nvml).examine(Look(ChecksSettings()))
    assert found.state == "unsupported"


def test_a_link_that_went_down_has_failed_until_it_is_up_again(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.hgx())
    links = dict(node.nvml.cards[2].links)
    node.look()
    node.change(2, links=links | {7: _DOWN, 9: _DOWN})
    for _ in range(3):
        (found,) = node.troubles()
        assert (found.state, found.failure_class) == ("failed", "reset")
        assert found.reason.startswith("GPU 2: links 7, 9 went down")
    node.change(2, links=links)
    assert node.troubles() == []


def test_after_a_reboot_a_link_that_stayed_down_is_seen_beside_other_gpus(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.hgx())
    node.look()
    node.change(2, links=dict(node.nvml.cards[2].links) | {7: _DOWN})
    node.reboot("second")
    (found,) = node.troubles()
    assert found.state == "warning"
    assert "17 links are up, and 18 on another" in found.reason
    assert found.reason.endswith("down: link 7")


def test_a_link_that_sleeps_is_up(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.nvl72())
    node.look()
    card = node.nvml.cards[0]
    asleep = {(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, 3): pynvml.NVML_NVLINK_STATE_SLEEP}
    node.change(0, links=dict(card.links) | {3: _DOWN}, link_fields={**card.link_fields, **asleep})
    assert node.troubles() == []


def test_errors_are_a_warning_once_and_a_failure_when_they_keep_coming(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.hgx(), nvlink_errors_limit=100, persistent_looks=3)
    node.look()
    states = []
    for errors in (101, 101, 250, 400, 400):
        node.change(1, link_errors=dict.fromkeys(range(18), 0) | {5: errors})
        states.append([(found.state, found.failure_class) for found in node.troubles()])
    warned, failed = [("warning", "watch")], [("failed", "drain")]
    assert states == [warned, warned, warned, failed, failed]


def test_few_errors_are_normal_and_old_ones_are_forgotten(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.hgx(), nvlink_errors_limit=100, nvlink_window_s=300.0)
    node.look()
    node.change(0, link_errors=dict.fromkeys(range(18), 100))
    assert node.troubles() == []
    node.change(0, link_errors=dict.fromkeys(range(18), 100) | {4: 900})
    assert [found.state for found in node.troubles()] == ["warning"]
    states = [bool(node.troubles()) for _ in range(6)]
    assert states == [True, True, True, True, False, False]


def test_links_of_the_fifth_generation_count_elsewhere(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.nvl72())
    node.look()
    fields = dict(node.nvml.cards[3].link_fields)
    node.change(3, link_fields=fields | {(pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS, 11): 500})
    (found,) = node.troubles()
    assert "link 11 had more than 100 errors" in found.reason


@pytest.mark.parametrize(
    ("error", "states"), [(fakes.UNKNOWN, ["unknown"]), (fakes.NOT_SUPPORTED, [])]
)
def test_links_that_cannot_be_read_are_not_taken_for_lost(
    tmp_path: Path, error: int, states: list[str]
) -> None:
    """A driver that answers "not supported" fails no link (A10.2)."""
    node = Node(tmp_path, fakes.hgx())
    node.look()
    node.change(4, broken={"nvmlDeviceGetNvLinkState": error})
    assert [found.state for found in node.troubles()] == states
    node.change(4, broken={})
    assert node.troubles() == []


def test_a_gpu_that_is_gone_is_left_to_the_other_check(tmp_path: Path) -> None:
    node = Node(tmp_path, fakes.hgx())
    node.look()
    node.change(4, broken={"nvmlDeviceGetNvLinkState": fakes.GPU_IS_LOST})
    assert node.troubles() == []
    assert len(node.look()) == 7
