"""What the check of the kernel's log says, over a file of its records and over the real one."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.kernel import records
from everstep_services.agent.probes.kernel.log import KernelLogProbe
from everstep_services.agent.probes.kernel.rules import RULES
from everstep_services.agent.probes.settings import ChecksSettings

_OOM = (
    "Out of memory: Killed process 28797 (python3) total-vm:25040124kB, anon-rss:24061916kB, "
    "file-rss:184kB, shmem-rss:0kB, UID:0 pgtables:47288kB oom_score_adj:0"
)
_FALLEN = (
    "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
_CONTAINED = (
    "NVRM: Xid (PCI:0000:3b:00): 94, pid=2341, name=python3, Contained: CE User Channel (0x9)."
)
_AER = (
    "pcieport 0000:00:03.0: AER: PCIe Bus Error: severity={}, type=Transaction Layer, (Receiver ID)"
)

LINES = [
    line.split(" | ", 3)
    for line in (Path(__file__).parent / "kernel_lines.txt").read_text().splitlines()
    if not line.startswith("#")
]

HARMLESS = [
    "python3[4711]: segfault at 10 ip 00007f sp 00007f error 4 in libtorch.so",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  570.124.06",
    "NVRM: GPU at PCI:0000:3b:00: GPU-0b6c1f4e-1111-2222-3333-444455556666",
    "mlx5_core 0000:12:00.0: firmware version: 28.39.1002",
    "blk_update_request: I/O error, dev sr0, sector 0 op 0x0:(READ)",
    "nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress non-posted",
    _AER.format("Corrected"),
    "mce: [Hardware Error]: Machine check events logged",
    "systemd[1]: Watchdog detected hard LOCKUP is what a program may write, too",
    "EXT4-fs (nvme0n1p1): mounted filesystem with ordered data mode",
    "evil: Xid (PCI:0000:3b:00): 79, not by the driver",
]


class Node:
    """A node whose kernel's log is a file with a record a line."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.memory: dict[str, Any] = {}
        self.sequence = 0
        self.now = 1000.0
        (root / "dev").mkdir()
        self.log = root / "dev/kmsg"
        self.log.touch()
        self.reboot("first")

    def reboot(self, boot: str) -> None:
        path = self.root / "proc/sys/kernel/random/boot_id"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{boot}\n")
        self.log.write_text("")
        self.sequence, self.now = 0, 1000.0

    def say(self, *texts: str, after_s: float = 0.0, priority: int = 4) -> None:
        self.now += after_s
        with self.log.open("a") as log:
            for text in texts:
                log.write(f"{priority},{self.sequence},{int(self.now * 1e6)},-;{text}\n")
                self.sequence += 1

    def look(self, after_s: float = 1.0) -> list[CheckResult]:
        self.now += after_s
        (self.root / "proc/uptime").write_text(f"{self.now:.2f} 1.00\n")
        look = Look(ChecksSettings(), root=self.root, memory=self.memory, at=1e9)
        found = list(KernelLogProbe().examine(look))
        self.memory = json.loads(json.dumps(look.memory))
        return found


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize(("code", "state", "part", "text"), LINES, ids=[row[0] for row in LINES])
def test_a_line_that_counts_has_its_rule(
    node: Node, code: str, state: str, part: str, text: str
) -> None:
    node.say(text)
    for after_s in (1.0, 60.0):
        (found,) = node.look(after_s)
        assert (found.code, found.state, found.subject) == (code, state, part)
        assert text[:60] in found.reason


def test_each_rule_is_tried() -> None:
    often = {rule.name for rule in RULES if rule.least > 1}
    assert {row[0] for row in LINES} | often == {rule.name for rule in RULES}


@pytest.mark.parametrize("text", HARMLESS)
def test_a_line_that_means_nothing_says_nothing(node: Node, text: str) -> None:
    node.say(text)
    (found,) = node.look()
    assert (found.state, found.reason) == ("ok", "")


@pytest.mark.parametrize(
    ("text", "code", "least"),
    [
        (_AER.format("Correctable"), "pcie_corrected", 100),
        ("[Hardware Error]: Corrected error, no action required", "machine_check_corrected", 10),
    ],
)
def test_corrected_errors_count_when_there_are_many(
    node: Node, text: str, code: str, least: int
) -> None:
    node.say(*[text] * (least - 1))
    assert node.look()[0].state == "ok"
    node.say(text)
    (found,) = node.look()
    assert (found.code, found.state) == (code, "warning")
    assert "times, last 1 s ago)" in found.reason


@pytest.mark.parametrize(
    ("trouble", "over"),
    [
        ("nfs: server 10.0.0.7 not responding, still trying", "nfs: server 10.0.0.7 OK"),
        (
            "Lustre: scratch-OST0001-osc-ffff: Connection to OST0001 (at 10.0.0.9) was lost",
            "Lustre: scratch-OST0001-osc-ffff: Connection restored to 10.0.0.9 (at 10.0.0.9)",
        ),
        (
            "mce: CPU7: Core temperature above threshold, cpu clock throttled (total events = 1)",
            "mce: CPU7: Core temperature/speed normal",
        ),
        (
            "mlx5_core 0000:12:00.0: device's health compromised - reached miss count",
            "mlx5_core 0000:12:00.0: try_recover:330:(pid 9): health recovery succeeded",
        ),
    ],
)
def test_what_is_over_does_not_count_any_more(node: Node, trouble: str, over: str) -> None:
    node.say(trouble)
    assert node.look()[0].state != "ok"
    node.say(over)
    assert node.look()[0].state == "ok"
    node.say(trouble)
    assert node.look()[0].state != "ok"


def test_an_xid_fails_the_gpu_by_its_uuid_where_the_driver_has_named_it(node: Node) -> None:
    node.say("NVRM: GPU at PCI:0000:3b:00: GPU-0b6c1f4e-1111-2222-3333-444455556666")
    node.look()
    node.say(_FALLEN)
    (found,) = node.look()
    assert (found.state, found.failure_class, found.code) == ("failed", "reboot", "XID 79")
    assert found.subject == "GPU-0b6c1f4e-1111-2222-3333-444455556666"
    assert found.reason.startswith("Xid 79 on 0000:3b:00: GPU has fallen off the bus")


@pytest.mark.parametrize(
    ("text", "state"),
    [
        (_CONTAINED, "ok"),
        ("NVRM: Xid (PCI:0000:3b:00): 45, pid=12, name=python3, Ch 00000008", "ok"),
        ("NVRM: Xid (PCI:0000:3b:00): 31, pid=12, name=python3, MMU Fault: ENGINE GRAPHICS", "ok"),
        ("NVRM: Xid (0000:3b:00): 4242, something new", "warning"),
        ("NVRM: Xid (PCI:0000:3b:00): 95, pid=12, name=python3, Uncontained: LTC", "failed"),
        ("NVRM: Xid (PCI:0000:3b:00): 99999999999999999999999, what", "warning"),
    ],
)
def test_each_xid_counts_as_its_table_says(node: Node, text: str, state: str) -> None:
    node.say(text)
    assert [found.state for found in node.look()] == [state]


def test_what_was_seen_once_is_remembered_until_its_time_is_over(node: Node) -> None:
    node.say(_FALLEN, _OOM)
    assert {found.code for found in node.look()} == {"XID 79", "out_of_memory"}
    node.log.write_text("")  # overwritten by the kernel in the meantime
    node.say("something else")
    assert {found.code for found in node.look()} == {"XID 79", "out_of_memory"}
    assert {found.code for found in node.look(after_s=7 * 3600.0)} == {"XID 79"}
    node.reboot("second")
    assert [found.state for found in node.look()] == ["ok"]


def test_what_only_a_reboot_cures_counts_until_then(node: Node) -> None:
    node.say("watchdog: Watchdog detected hard LOCKUP on cpu 3", _OOM)
    node.look()
    assert [found.code for found in node.look(after_s=86400.0)] == ["hard_lockup"]
    node.reboot("second")
    assert [found.state for found in node.look()] == ["ok"]


def test_the_same_line_again_and_again_keeps_the_notes_small(node: Node) -> None:
    node.say(*[_OOM] * 5000)
    (found,) = node.look()
    assert "(100 or more times, last" in found.reason
    assert len(json.dumps(node.memory)) < 30_000


def test_a_line_is_counted_once_however_often_the_log_is_read(node: Node) -> None:
    node.say(_OOM)
    for _ in range(3):
        (found,) = node.look()
        assert "times" not in found.reason
    node.say(_OOM)
    assert "(2 times, last" in node.look()[0].reason


def test_lines_that_programs_wrote_into_the_log_are_not_the_kernels(node: Node) -> None:
    node.say(_FALLEN, priority=12)  # facility 1: user
    assert [found.state for found in node.look()] == ["ok"]


def test_what_continues_a_record_or_is_none_is_passed_over(node: Node) -> None:
    node.say(_OOM)
    with node.log.open("a") as log:
        log.write(f" SUBSYSTEM=pci\n DEVICE=+pci:0000:00:03.0\n,,;\nx,y,z,-;{_FALLEN}\n")
        log.write(f"{_FALLEN}\n4,77\n")
    with node.log.open("ab") as raw:
        raw.write(b"4,1,2,-;\xff\xfe broken\n4,2,3,-,caller=T1;" + b"x" * 100_000 + b"\n")
    assert {found.code for found in node.look()} == {"out_of_memory"}


def test_lines_that_were_lost_are_said(node: Node) -> None:
    node.say("one")
    node.look()
    node.sequence += 40
    node.say("two")
    (found,) = node.look()
    assert (found.state, found.reason) == ("ok", "40 lines were overwritten before they were read")


def test_many_kinds_of_lines_keep_the_notes_small_and_the_xid_in_them(node: Node) -> None:
    node.say(_FALLEN)
    for number in range(2000):
        node.say(*[f"Out of memory: Killed process {number} (task-{number}) total"] * 3)
    found = node.look()
    assert len(json.dumps(node.memory)) < 200_000
    assert "XID 79" in {result.code for result in found}


def test_a_log_that_never_ends_is_read_in_parts(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text("".join(f"4,{n},{n},-;{'line ' * 100}{n}\n" for n in range(200)))
    first = records.read(path, -1, most=2)
    assert first.has_more
    rest = records.read(path, first.position)
    assert not rest.has_more
    assert first.position < rest.position == 199
    assert len(first.records) + len(rest.records) == 200


def test_without_a_log_the_check_is_unsupported(node: Node) -> None:
    node.log.unlink()
    assert [found.state for found in node.look()] == ["unsupported"]


def test_a_log_that_may_not_be_read_is_unknown_with_a_remedy(node: Node) -> None:
    node.log.unlink()
    node.log.mkdir()  # root may read every file; a folder cannot be read by anybody
    (found,) = node.look()
    assert found.state == "unknown"
    assert "kernel.dmesg_restrict=0" in found.reason


def test_without_a_clock_the_latest_line_is_now(node: Node) -> None:
    node.say(_OOM)
    look = Look(ChecksSettings(), root=node.root)
    (found,) = KernelLogProbe().examine(look)
    assert "(0 s ago)" in found.reason


@pytest.fixture
def real_log() -> Path:
    path = Path("/dev/kmsg")
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
    except OSError as error:
        pytest.skip(f"/dev/kmsg cannot be read here: {error}")
    return path


def test_the_real_log_is_read_to_its_end_without_waiting(real_log: Path) -> None:
    whole = records.read(real_log, -1)
    assert whole.position >= 0
    sequences = [record.sequence for record in whole.records]
    assert sequences == sorted(set(sequences))
    again = records.read(real_log, whole.position)
    assert again.position >= whole.position
    assert all(record.sequence > whole.position for record in again.records)
    part = records.read(real_log, -1, most=1)
    assert part.has_more == (len(sequences) > 0)
