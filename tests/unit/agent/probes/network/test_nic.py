"""What the check of network ports says, over a folder that looks like `/sys`."""

import json
from pathlib import Path, PurePath
from typing import Any

import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.network.nic import NicProbe, nearest_gpus
from everstep_services.agent.probes.settings import ChecksSettings

_DAY_S = 86400.0


class Node:
    """A node with adapters of one port each, looked at once a minute."""

    def __init__(self, root: Path, **settings: Any) -> None:
        self.root = root
        self.settings = ChecksSettings(**settings)
        self.memory: dict[str, Any] = {}
        self.at = 1e9

    def write(self, path: str, text: str) -> None:
        whole = self.root / path
        whole.parent.mkdir(parents=True, exist_ok=True)
        whole.write_text(text)

    def port(self, adapter: str, number: int, name: str, text: str) -> None:
        self.write(f"sys/class/infiniband/{adapter}/ports/{number}/{name}", text)

    def plug(self, adapter: str, *, state: str = "4: ACTIVE", number: int = 1) -> None:
        self.port(adapter, number, "state", f"{state}\n")
        self.port(adapter, number, "phys_state", "5: LinkUp\n")
        self.port(adapter, number, "rate", "400 Gb/sec (4X NDR)\n")
        self.port(adapter, number, "counters/link_downed", "0\n")

    def remove(self, adapter: str) -> None:
        folder = self.root / "sys/class/infiniband" / adapter
        folder.rename(self.root / f"removed-{adapter}")

    def put_back(self, adapter: str) -> None:
        (self.root / f"removed-{adapter}").rename(self.root / "sys/class/infiniband" / adapter)

    def device(self, *bridges: str) -> Path:
        folder = self.root.joinpath("sys/devices/pci0000:00", *bridges)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def look(self, after_s: float = 60.0) -> dict[str, CheckResult]:
        self.at += after_s
        look = Look(self.settings, root=self.root, memory=self.memory, at=self.at)
        found = {result.subject: result for result in NicProbe().examine(look)}
        self.memory = json.loads(json.dumps(look.memory))
        return found

    def states(self) -> dict[str, str]:
        return {name: result.state for name, result in self.look().items()}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = Node(tmp_path)
    for index in range(2):
        made.plug(f"mlx5_{index}")
    return made


def test_a_node_without_adapters_is_unsupported(tmp_path: Path) -> None:
    assert Node(tmp_path).states() == {"": "unsupported"}


def test_ports_that_are_up_are_ok(node: Node) -> None:
    for _ in range(3):
        assert node.states() == {"mlx5_0/1": "ok", "mlx5_1/1": "ok"}


def test_a_port_that_was_never_active_is_ignored(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.plug("mlx5_0", state="1: DOWN")
    assert node.states() == {"": "unsupported"}
    node.plug("mlx5_1")
    assert node.states() == {"mlx5_1/1": "ok"}


def test_a_port_that_left_the_network_has_failed_until_it_is_back(node: Node) -> None:
    node.look()
    node.port("mlx5_1", 1, "state", "1: DOWN\n")
    node.port("mlx5_1", 1, "phys_state", "3: Disabled\n")
    for _ in range(2):
        found = node.look()
        assert found["mlx5_0/1"].state == "ok"
        assert (found["mlx5_1/1"].state, found["mlx5_1/1"].failure_class) == ("failed", "drain")
        assert found["mlx5_1/1"].reason == "DOWN, and its link Disabled; it was ACTIVE before"
    node.plug("mlx5_1")
    assert node.states() == {"mlx5_0/1": "ok", "mlx5_1/1": "ok"}


def test_a_port_that_is_coming_up_is_given_one_look(node: Node) -> None:
    node.look()
    node.port("mlx5_1", 1, "state", "2: INIT\n")
    assert [node.states()["mlx5_1/1"] for _ in range(3)] == ["warning", "failed", "failed"]
    node.plug("mlx5_1")
    node.look()
    node.port("mlx5_1", 1, "state", "3: ARMED\n")
    assert node.states()["mlx5_1/1"] == "warning"


def test_what_cannot_be_read_is_unknown_and_not_forgotten(node: Node) -> None:
    node.look()
    (node.root / "sys/class/infiniband/mlx5_1/ports/1/state").unlink()
    assert [node.states()["mlx5_1/1"] for _ in range(2)] == ["unknown", "unknown"]
    node.port("mlx5_1", 1, "state", "1: DOWN\n")
    node.port("mlx5_1", 1, "phys_state", "2: Polling\n")
    assert node.states()["mlx5_1/1"] == "failed"


def test_an_adapter_that_disappeared_has_failed_at_the_second_look(node: Node) -> None:
    node.look()
    node.remove("mlx5_1")
    assert [node.states()["mlx5_1/1"] for _ in range(3)] == ["warning", "failed", "failed"]
    assert node.look()["mlx5_1/1"].failure_class == "reboot"
    node.put_back("mlx5_1")
    assert node.states() == {"mlx5_0/1": "ok", "mlx5_1/1": "ok"}


def test_all_adapters_gone_at_once_is_a_driver_not_hardware(node: Node) -> None:
    node.look()
    for index in range(2):
        node.remove(f"mlx5_{index}")
    for _ in range(3):
        (found,) = node.look().values()
        assert found.state == "unknown"
        assert found.reason.startswith("all 2 ports that were active have disappeared at once")


def test_a_port_out_of_use_for_a_week_is_forgotten(node: Node) -> None:
    node.look()
    node.port("mlx5_1", 1, "state", "1: DOWN\n")
    assert node.look(6 * _DAY_S)["mlx5_1/1"].state == "failed"
    assert "mlx5_1/1" not in node.look(2 * _DAY_S)


def test_lost_links_are_a_warning_and_too_many_within_the_window_a_failure(node: Node) -> None:
    node.look()
    said = []
    for downs in (1, 1, 3, 3):
        node.port("mlx5_0", 1, "counters/link_downed", f"{downs}\n")
        said.append(node.look()["mlx5_0/1"])
    assert [found.state for found in said] == ["warning", "warning", "failed", "failed"]
    assert said[2].reason == "lost its link 3 times in 3600 s (limit 3)"
    assert node.look(2 * 3600.0)["mlx5_0/1"].state == "ok"


def test_a_counter_that_began_anew_is_no_flap_of_the_past(node: Node) -> None:
    node.port("mlx5_0", 1, "counters/link_downed", "200\n")
    assert node.states()["mlx5_0/1"] == "ok"
    node.port("mlx5_0", 1, "counters/link_downed", "1\n")
    assert node.look()["mlx5_0/1"].reason.startswith("lost its link 1 times")


def test_a_roce_adapter_counts_lost_links_where_ethernet_does(node: Node) -> None:
    (node.root / "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed").unlink()
    node.port("mlx5_0", 1, "gid_attrs/ndevs/0", "eth2\n")
    node.write("sys/class/net/eth2/carrier_down_count", "7\n")
    assert node.states()["mlx5_0/1"] == "ok"
    node.write("sys/class/net/eth2/carrier_down_count", "8\n")
    assert node.states()["mlx5_0/1"] == "warning"


@pytest.mark.parametrize("garbage", ["", "many\n", "\x00\xff"])
def test_a_counter_that_makes_no_sense_is_passed_over(node: Node, garbage: str) -> None:
    node.port("mlx5_0", 1, "counters/link_downed", garbage)
    node.port("mlx5_0", 1, "rate", garbage)
    assert node.states()["mlx5_0/1"] == "ok"


def test_a_port_that_became_slower_is_worth_watching(node: Node) -> None:
    node.look()
    node.port("mlx5_0", 1, "rate", "200 Gb/sec (4X HDR)\n")
    assert node.look()["mlx5_0/1"].reason == "runs at 200 Gbit/s instead of 400"
    assert node.states()["mlx5_0/1"] == "warning"


def test_ignored_adapters_are_neither_judged_nor_missed(node: Node) -> None:
    node.look()
    node.settings = ChecksSettings(nic_ignored=("mlx5_1",))
    node.remove("mlx5_1")
    assert node.states() == {"mlx5_0/1": "ok"}


def test_the_gpus_that_are_near_a_failed_port_are_named(node: Node) -> None:
    # Two switches, each with a GPU and an adapter below it, as on an HGX board.
    for index in range(2):
        switch = f"0000:{index + 1:02x}:00.0"
        card = f"0000:{0x1A + index:02x}:00.0"
        gpu = node.device(switch, card)
        (gpu / "vendor").write_text("0x10de\n")
        (gpu / "class").write_text("0x030200\n")
        listed = node.root / "sys/bus/pci/devices" / card
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.symlink_to(gpu)
        adapter = node.device(switch, f"0000:{0x2A + index:02x}:00.0")
        (node.root / f"sys/class/infiniband/mlx5_{index}/device").symlink_to(adapter)
    node.look()
    node.port("mlx5_1", 1, "state", "1: DOWN\n")
    assert node.look()["mlx5_1/1"].reason.endswith(
        "nearest to GPU 1, as a rule of the same local rank"
    )


def test_near_is_who_shares_most_bridges() -> None:
    root = "/sys/devices/pci0000:00"
    gpus = {
        "0000:10:00.0": PurePath(f"{root}/0000:00:01.0/0000:01:00.0/0000:10:00.0"),
        "0000:20:00.0": PurePath(f"{root}/0000:00:01.0/0000:02:00.0/0000:20:00.0"),
        "0000:90:00.0": PurePath("/sys/devices/pci0000:80/0000:80:01.0/0000:90:00.0"),
    }
    adapters = {
        "mlx5_0": PurePath(f"{root}/0000:00:01.0/0000:01:00.0/0000:11:00.0"),
        "mlx5_1": PurePath(f"{root}/0000:00:01.0/0000:12:00.0"),
        "mlx5_2": PurePath(f"{root}/0000:00:01.0/0000:13:00.0"),
        "eth0": PurePath(f"{root}/0000:00:09.0"),
    }
    assert nearest_gpus(gpus, adapters) == {
        # The second GPU is below the same bridge as three adapters, and nearer to none.
        "mlx5_0": ("0000:10:00.0", "0000:20:00.0"),
        "mlx5_1": ("0000:20:00.0",),
        "mlx5_2": ("0000:20:00.0",),
        "eth0": (),
    }
    assert nearest_gpus(gpus, {}) == {}
