"""The [checks] section: what is examined on this node, and the limits past which it is not fit."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

from everstep.settings import Settings

SITE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]*(\.[A-Za-z0-9_-]+)*")
"""The allowed names of checks of the site."""

PROBED = ("gpu", "host", "kernel", "nic", "nvlink")
"""The checks that run as probes unless the settings say otherwise."""
_MAY_BE_PROBES = (*PROBED, "daemon", "storage")

ProbePolicy = Literal["observe", "end_round", "exclude"]
"""What follows when a probe fails: only records, another round without the node while the probe
fails, or another round without the node for good.
"""


class ProbeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one check runs as a probe, in short intervals, also while ranks train."""

    every_s: float = 30.0
    """How often; 0 for never."""
    within_s: float = 5.0
    """How long one run may take before its result is `unknown`."""
    failures: int = 3
    """How many runs in a row must fail before the probe counts as failed."""
    passes: int = 2
    """How many runs in a row must pass before a failed probe counts as recovered."""
    policy: ProbePolicy = "observe"
    """What follows when it has failed."""

    def __post_init__(self) -> None:
        if not (self.every_s == 0 or 1 <= self.every_s < 1e6):
            raise ValueError(f"every_s must be 0, or 1 or more, got {self.every_s:g}")
        if not 0 < self.within_s <= 600:
            raise ValueError(f"within_s must be above 0 and at most 600, got {self.within_s:g}")
        for name in ("failures", "passes"):
            if not 1 <= getattr(self, name) <= 1000:
                raise ValueError(f"{name} must be from 1 to 1000, got {getattr(self, name)}")


class ChecksSettings(Settings, frozen=True, kw_only=True):
    """How a node is examined. A check that passes a limit gives the limit in its reason."""

    every_s: float = 300.0
    """How often an agent examines its node."""
    join_waits_s: float = 3.0
    """How long an agent's first `join` waits for the checks; 0 for no wait."""
    within_s: float = 10.0
    """How long one check may take before it counts as `unknown`."""
    all_within_s: float = 60.0
    """How long all checks together may take."""

    memory_least_percent: float = 2.0
    """A warning when less than this part of the memory is available, in percent."""
    memory_pressure_percent: float = 10.0
    """A warning when all processes wait for memory for more than this part of a minute."""
    clock_off_s: float = 1.0
    """A clock that may be wrong by more than this, or that jumps by more, is a warning."""
    shm_least_mib: int = 1024
    """A warning when `/dev/shm` is smaller: ranks and their data workers share memory there."""
    room_least_mib: int = 1024
    """A warning when less space is free in a watched folder, or in `/dev/shm`, in MiB."""
    room_failed_mib: int = 64
    """A failure when less space is free there, in MiB."""
    inodes_least_percent: float = 1.0
    """A warning when a watched folder has room for fewer new files, in percent of its inodes."""
    room_paths: tuple[Path, ...] = ()
    """Folders whose space is watched, besides `/tmp` and the state directory."""
    open_files_least: int = 4096
    """A warning when the limit of open files (ulimit -n) is lower."""
    processes_least: int = 4096
    """A warning when the limit of processes (ulimit -u) is lower."""
    load_per_cpu: float = 4.0
    """A warning when the load of five minutes, divided by the number of processors, is higher."""
    zombies_limit: int = 200
    """A warning when there are more zombies: processes that have exited and that no parent has
    reaped.
    """

    storage_paths: tuple[Path, ...] = ()
    """Folders to write to and read from; by default all mounts of network file systems."""
    storage_within_s: float = 15.0
    """How long the test of one folder may take before the folder has failed."""

    network_least_mib_s: float = 0.0
    """A failure when the bandwidth between two nodes is lower, in MiB/s; 0 only measures."""
    network_most_ms: float = 0.0
    """A failure when the round trip between two nodes takes longer, in ms; 0 only measures."""

    gpus_expected: int | None = None
    """How many GPUs this node must have; by default as many as at the last look."""
    gpu_temperature_warning_c: float | None = None
    """A warning when a GPU is hotter; by default 5 °C below the limit at which it slows down."""
    gpu_stranger_mib: int = 1024
    """A warning when processes of others hold more memory of a GPU, in MiB."""
    persistent_looks: int = 3
    """The number of looks after which a GPU that slows down, or a link with errors, has failed."""
    nvlink_errors_limit: int = 100
    """A warning when an NVLink has more errors between two looks."""
    nvlink_window_s: float = 3600.0
    """How far back errors of NVLinks count."""
    nic_flaps_limit: int = 3
    """How often a port may lose its link within the window before it has failed."""
    nic_window_s: float = 3600.0
    """How far back lost links of ports count."""
    nic_ignored: tuple[str, ...] = ()
    """Adapters that training does not use: `mlx5_bond_0`."""
    kernel_window_s: float = 6 * 3600.0
    """How long a line of the kernel's log counts against this node, unless only a reboot helps."""
    selftest_s: float = 5.0
    """How long the self-test computes on all GPUs, once it has started."""
    selftest_within_s: float = 90.0
    """How long the self-test may take in all; most of that is the start of torch."""

    daemon: Path | None = None
    """The unix socket of a health daemon of this node, which the check `daemon` asks by gRPC as
    NVRx does; by default there is none.
    """
    daemon_arguments: tuple[str, ...] = ("--no-slurm", "--group", "prolog", "epilog", "logs", "gpu")
    """The arguments that the daemon gets."""
    daemon_within_s: float = 60.0
    """How long the daemon may take."""
    daemon_silent: Literal["unknown", "ok", "failed"] = "unknown"
    """The result when the daemon is away, too slow, or answers without a count of failures."""

    probes: dict[str, ProbeSettings] = msgspec.field(default_factory=dict)
    """Probes: checks that run in short intervals, also during a training, by the check's name
    (`nic`, `storage`, `daemon`, `site:NAME`). Each has `every_s` (30; 0 for never), `within_s` (5),
    `failures` (3) and `passes` (2) in a row before a failure or a recovery counts, and `policy`:
    `observe`, `end_round` or `exclude`. `gpu`, `host`, `kernel`, `nic` and `nvlink` are probes
    without being named.
    """
    probe_cpu_percent: float = 0.5
    """The most processor time that all probes together take, in percent of one core. A probe that
    needs more than its part runs less often.
    """
    probes_at_once: int = 2
    """How many probes may run at the same time."""

    site: dict[str, str] = msgspec.field(default_factory=dict)
    """Your own checks by name: a command line each, with the exit codes of Nagios."""
    site_dir: Path | None = None
    """A folder of executables that are checks, too, each by its file's name."""

    def __post_init__(self) -> None:
        self._above_zero("every_s within_s all_within_s storage_within_s daemon_within_s", 1e6)
        if self.room_failed_mib > self.room_least_mib:
            raise ValueError(
                f"room_failed_mib must not be above room_least_mib, got "
                f"{self.room_failed_mib} > {self.room_least_mib}"
            )
        if not 0.01 <= self.probe_cpu_percent <= 100:
            raise ValueError(
                f"probe_cpu_percent must be from 0.01 to 100, got {self.probe_cpu_percent:g}"
            )
        if not 1 <= self.probes_at_once <= 16:
            raise ValueError(f"probes_at_once must be from 1 to 16, got {self.probes_at_once}")
        for name in self.probes:
            _refuse_wrong_probe(name)
        for name, line in self.site.items():
            _refuse_wrong_site_check(name, line)

    def probes_to_run(self) -> Mapping[str, ProbeSettings]:
        """The probes of this node, by the name of their check."""
        usual = dict.fromkeys(PROBED, ProbeSettings())
        return {name: probe for name, probe in (usual | self.probes).items() if probe.every_s}


def _refuse_wrong_probe(name: str) -> None:
    site, _, own = name.partition(":")
    if name in _MAY_BE_PROBES or (site == "site" and SITE_NAME.fullmatch(own)):
        return
    raise ValueError(
        f"probes: {name!r} cannot be a probe: use {', '.join(sorted(_MAY_BE_PROBES))} or site:NAME"
    )


def _refuse_wrong_site_check(name: str, line: str) -> None:
    if not SITE_NAME.fullmatch(name):
        raise ValueError(
            f"site: {name!r} is not a name for a check: use letters, digits, '_', '-' and '.'"
        )
    try:
        words = shlex.split(line)
    except ValueError as error:
        raise ValueError(
            f"site: the command of {name}, {line!r}, cannot be read: {error}"
        ) from error
    if not words:
        raise ValueError(f"site: {name} has no command: name an executable")
