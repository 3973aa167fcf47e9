"""A table: which lines of the kernel's log speak against a node. Xids have a table of their own."""

import re
from dataclasses import dataclass

from everstep_services.agent.probes.base import CheckState, FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """The meaning of a kind of line."""

    name: str
    words: tuple[str, ...]
    """One of these words is in each such line, and in the line that ends the trouble."""
    pattern: str
    """Its group `part`, if there is one, names the part of the node."""
    about: str
    state: CheckState = "warning"
    failure_class: FailureClass = "report"
    least: int = 1
    """Fewer lines than this within the window are ignored."""
    over: str = ""
    """A line that ends the trouble of the same part."""

    def part(self, text: str) -> str | None:
        """The part that a line is about; None if the line is of another kind."""
        return self._part(self.pattern, text)

    def is_over(self, text: str) -> str | None:
        """The part whose trouble this line ends."""
        return self._part(self.over, text) if self.over else None

    def _part(self, pattern: str, text: str) -> str | None:
        match = re.search(pattern, text)
        return None if match is None else str(match.groupdict().get("part") or "")


_PCI = r"(?P<part>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])"

RULES: tuple[KernelRule, ...] = (
    # NVIDIA's switches: "Fatal NVSwitch SXid Errors" in the Fabric Manager User Guide
    KernelRule(
        name="sxid",
        words=("SXid",),
        pattern=r"^nvidia-nvswitch\d+: SXid \(PCI:(?P<part>[0-9a-fA-F:.]+)\): \d+, Fatal",
        about="an NVSwitch reported a fatal error",
        state="failed",
        failure_class="reset",
    ),
    # processors, memory, bus
    KernelRule(
        name="machine_check",
        words=("Hardware Error", "EDAC", "Memory failure"),
        pattern=r"\[Hardware Error\]:.*"
        r"(?:\bUncorrected\b|severity: (?:recoverable|fatal)|Machine Check Exception)"
        r"|^EDAC .*\b\d+ UE\b|^Memory failure: 0x[0-9a-f]+: (?:recovery action|Sending SIGBUS)",
        about="uncorrected hardware error of a processor or of memory",
        state="failed",
        failure_class="drain",
    ),
    KernelRule(
        name="machine_check_corrected",
        words=("Hardware Error", "EDAC"),
        pattern=r"\[Hardware Error\]:.*\bCorrected error\b|^EDAC .*\b\d+ CE\b",
        about="corrected hardware errors keep coming",
        failure_class="watch",
        least=10,
    ),
    KernelRule(
        name="pcie_fatal",
        words=("PCIe Bus Error",),
        pattern=r"^\S+ " + _PCI + r": "
        r"(?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Fatal\)",
        about="fatal error of a PCIe device",
        state="failed",
        failure_class="reboot",
    ),
    KernelRule(
        name="pcie",
        words=("PCIe Bus Error",),
        pattern=r"^\S+ " + _PCI + r": "
        r"(?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) \(Non-Fatal\)",
        about="uncorrected error of a PCIe device",
        failure_class="watch",
    ),
    KernelRule(
        name="pcie_corrected",
        words=("PCIe Bus Error",),
        pattern=r"^\S+ " + _PCI + r": "
        r"(?:AER: )?PCIe Bus Error: severity=Correct(?:ed|able)",
        about="corrected errors of a PCIe device keep coming",
        failure_class="watch",
        least=100,
    ),
    # adapters
    KernelRule(
        name="mlx5_dead",
        words=("mlx5_core",),
        pattern=r"^mlx5_core " + _PCI + r".*"
        r"(?:health compromised|[Ff]atal (?:firmware )?error|device's health)",
        about="a network adapter stopped working",
        state="failed",
        failure_class="reboot",
        over=r"^mlx5_core " + _PCI + r".*health recovery succeeded",
    ),
    KernelRule(
        name="mlx5",
        words=("mlx5_core",),
        pattern=r"^mlx5_core " + _PCI + r".*"
        r"(?:TX timeout|Cable error|High temperature|assert_var|\) timeout\.)",
        about="a network adapter has a problem",
        failure_class="watch",
    ),
    # file systems
    KernelRule(
        name="ext4_stopped",
        words=("EXT4-fs",),
        pattern=r"^EXT4-fs \((?P<part>[^)]+)\): Remounting filesystem read-only",
        about="a file system may not be written to any more",
        state="failed",
        failure_class="drain",
    ),
    KernelRule(
        name="xfs_stopped",
        words=("XFS",),
        pattern=r"^XFS \((?P<part>[^)]+)\): .*"
        r"(?:Filesystem has been shut down|Shutting down filesystem)",
        about="a file system may not be used any more",
        state="failed",
        failure_class="drain",
    ),
    KernelRule(
        name="ext4",
        words=("EXT4-fs",),
        pattern=r"^EXT4-fs error \(device (?P<part>[^)]+)\)",
        about="a file system reported errors in itself",
        failure_class="watch",
    ),
    KernelRule(
        name="xfs",
        words=("XFS",),
        pattern=r"^XFS \((?P<part>[^)]+)\): .*(?:[Cc]orruption|metadata I/O error)",
        about="a file system reported errors in itself",
        failure_class="watch",
    ),
    KernelRule(
        name="disk",
        words=("I/O error",),
        pattern=r"\bI/O error, dev (?P<part>(?!sr|fd|loop)\S+?),",
        about="a disk could not be read or written",
        failure_class="watch",
    ),
    KernelRule(
        name="nfs",
        words=("nfs: server",),
        pattern=r"^nfs: server (?P<part>\S+) not responding",
        about="an NFS server does not answer",
        over=r"^nfs: server (?P<part>\S+) OK",
    ),
    KernelRule(
        name="lustre",
        words=("Lustre: ",),
        pattern=r"^Lustre: (?P<part>[^:]+): Connection to .* was lost",
        about="the connection to a Lustre server was lost",
        over=r"^Lustre: (?P<part>[^:]+): Connection restored to",
    ),
    KernelRule(
        name="lustre_evicted",
        words=("Lustre",),
        pattern=r"^LustreError: .*?(?P<part>[\w-]+): This client was evicted",
        about="a Lustre server has evicted this node",
        over=r"^Lustre: (?P<part>[\w-]+?): Connection restored to",
    ),
    # processes
    KernelRule(
        name="out_of_memory",
        words=("Killed process",),
        pattern=r"^(?:Out of memory|Memory cgroup out of memory): Killed process "
        r"\d+ \((?P<part>.{0,15}?)\)",
        about="the kernel killed a process for lack of memory",
    ),
    KernelRule(
        name="hard_lockup",
        words=("LOCKUP",),
        pattern=r"Watchdog detected hard LOCKUP on cpu \d+",
        about="a processor stopped",
        state="failed",
        failure_class="reboot",
    ),
    KernelRule(
        name="soft_lockup",
        words=("soft lockup",),
        pattern=r"BUG: soft lockup - CPU#\d+ stuck",
        about="a processor was stuck in the kernel",
        failure_class="watch",
    ),
    KernelRule(
        name="hung_task",
        words=("INFO: task",),
        pattern=r"^INFO: task (?P<part>.+):\d+ blocked for more than \d+ seconds",
        about="a process waits for a device or a file system",
        failure_class="watch",
    ),
    # heat
    KernelRule(
        name="hot_processor",
        words=(" temperature",),
        pattern=r"^(?:mce: )?CPU\d+: (?:Core|Package) temperature (?:is )?above threshold",
        about="a processor is too hot and slows down",
        failure_class="watch",
        over=r"^(?:mce: )?CPU\d+: (?:Core|Package) temperature/speed (?:is )?normal",
    ),
)
"""The first rule that fits a line decides."""

_WORDS = tuple(dict.fromkeys(word for rule in RULES for word in rule.words))


def may_count(text: str) -> bool:
    """False if no rule fits the line; hardly any line needs more than this look."""
    return any(word in text for word in _WORDS)
