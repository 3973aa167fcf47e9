"""The host check: each limit, each thing that may be missing or garbled, each count."""

from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.probes.host import clock, disk_space, limits, memory
from everstep_services.agent.probes.host.clock import KernelClock
from everstep_services.agent.probes.host.common import MIB
from everstep_services.agent.probes.host.disk_space import DiskSpace
from everstep_services.agent.probes.host.limits import ProcessLimits
from everstep_services.agent.probes.host.probe import HostProbe
from everstep_services.agent.probes.settings import ChecksSettings
from tests.unit.agent.probes.looks import BOOT, look_at, states

MEMINFO = "MemTotal:       1000000 kB\nMemFree: 1 kB\nMemAvailable:   {} kB\n"
PRESSURE = "some avg10=0.00 avg60={} avg300=0.00 total=1\nfull avg10=0 avg60={} avg300=0 total=1\n"


@pytest.mark.parametrize(
    ("available", "state"), [(1000000, "ok"), (20000, "ok"), (19999, "warning"), (0, "warning")]
)
def test_little_available_memory_is_a_warning(tmp_path: Path, available: int, state: str) -> None:
    (one,) = memory.available(look_at(tmp_path, {"proc/meminfo": MEMINFO.format(available)}))
    assert one.state == state
    if state == "warning":
        assert one.reason.startswith(f"{available >> 10} MiB are available, ")
        assert "(least 2 %)" in one.reason


@pytest.mark.parametrize(
    ("some", "full", "state"), [(90, 10, "ok"), (20, 10.01, "warning"), (0, 0, "ok")]
)
def test_only_what_all_wait_for_is_memory_pressure(
    tmp_path: Path, some: float, full: float, state: str
) -> None:
    look = look_at(tmp_path, {"proc/pressure/memory": PRESSURE.format(some, full)})
    (one,) = memory.pressure(look)
    assert one.state == state


def test_kills_count_since_the_last_look_of_the_same_boot(tmp_path: Path) -> None:
    notes: dict[str, Any] = {}

    def state_with(kills: int, own: int, boot: str = "a") -> tuple[str, str]:
        files = {
            BOOT: boot,
            "proc/vmstat": f"nr_free_pages 5\noom_kill {kills}\n",
            "proc/self/cgroup": "0::/job/7\n",
            "sys/fs/cgroup/job/7/memory.events": f"low 0\noom_kill {own}\n",
        }
        (one,) = memory.kills(look_at(tmp_path, files, memory=notes))
        return one.state, one.reason

    assert state_with(40, 4) == ("ok", "")
    assert state_with(40, 4) == ("ok", "")
    state, reason = state_with(43, 5)
    assert state == "warning"
    assert "3 killed for lack of memory on this host; 1 killed" in reason
    assert state_with(43, 5) == ("ok", "")
    assert state_with(50, 9, boot="b") == ("ok", "")


def test_memory_errors_that_were_not_corrected_fail_a_node(tmp_path: Path) -> None:
    notes: dict[str, Any] = {}

    def found(uncorrected: str, corrected: str) -> tuple[str, str]:
        folder = "sys/devices/system/edac/mc/mc0"
        files = {f"{folder}/ue_count": uncorrected, f"{folder}/ce_count": corrected}
        (one,) = memory.errors(look_at(tmp_path, files, memory=notes))
        assert one.subject == "memory errors mc0"
        return one.state, one.failure_class

    assert found("2\n", "9\n") == ("warning", "replace")
    assert found("2\n", "109\n") == ("ok", "")
    assert found("2\n", "210\n") == ("warning", "watch")
    assert found("3\n", "210\n") == ("failed", "replace")


@pytest.mark.parametrize(
    ("kernel_clock", "state"),
    [
        (KernelClock(is_kept=True, most_off_s=0.02), "ok"),
        (KernelClock(is_kept=True, most_off_s=1.5), "warning"),
        (KernelClock(is_kept=False, most_off_s=16), "warning"),
    ],
)
def test_a_clock_that_may_be_wrong_is_a_warning(
    tmp_path: Path, kernel_clock: KernelClock, state: str
) -> None:
    """`everstep check` reports a clock that is not kept (A1.5)."""
    (one,) = clock.kept(look_at(tmp_path, {}), lambda: kernel_clock)
    assert one.state == state


def test_the_kernel_tells_of_its_clock_or_refuses_to() -> None:
    try:
        kernel_clock = clock.kernel_clock()
    except OSError:
        return
    assert kernel_clock.most_off_s >= 0


def test_a_clock_that_was_set_is_told_once(tmp_path: Path) -> None:
    look = look_at(tmp_path, {})
    at = [1000.0, 1000.9, -2599.1, -2599.1]
    found = [clock.judge_jump(look, booted_at) for booted_at in at]
    assert [one.state for one in found] == ["ok", "ok", "warning", "ok"]
    assert "set by -3600.0 s since the last look" in found[2].reason


GIB = 1024 * MIB


@pytest.mark.parametrize(
    ("room", "found"),
    [
        (DiskSpace(100 * GIB, 50 * GIB, 1000, 500), []),
        (DiskSpace(100 * GIB, GIB - MIB, 1000, 500), ["warning"]),
        (DiskSpace(100 * GIB, 63 * MIB, 1000, 500), ["failed"]),
        (DiskSpace(100 * GIB, 0, 1000, 9), ["failed", "warning"]),
        (DiskSpace(100 * GIB, 50 * GIB, 0, 0), []),  # btrfs counts no files
        (DiskSpace(64 * MIB, 60 * MIB, 0, 0), []),  # a small one that is not full
        (DiskSpace(GIB // 2, 0, 0, 0), ["failed"]),
        (DiskSpace(100 * GIB, 50 * GIB, 10, 5, is_read_only=True), ["warning"]),
    ],
)
def test_room_is_judged_by_what_is_free(room: DiskSpace, found: list[str]) -> None:
    assert [state for state, _ in disk_space.judge(room, ChecksSettings())] == found


def test_small_shared_memory_is_a_warning_and_says_how_to_enlarge_it(tmp_path: Path) -> None:
    """`everstep check` finds a /dev/shm of 64 MiB, and names the option (A1.5)."""
    (tmp_path / "dev/shm").mkdir(parents=True)
    docker = DiskSpace(64 * MIB, 60 * MIB, 0, 0)
    (one,) = disk_space.shared_memory(look_at(tmp_path, {}), lambda path: docker)
    assert one.state == "warning"
    assert "only 64 MiB (least 1024 MiB); in a container: --shm-size" in one.reason


def test_without_shared_memory_there_is_a_warning(tmp_path: Path) -> None:
    (one,) = disk_space.shared_memory(look_at(tmp_path, {}))
    assert one.state == "warning"


def test_a_folder_that_is_not_there_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    asked: list[Path] = []

    def ask(path: Path) -> DiskSpace:
        asked.append(path)
        if path.name == "data":
            raise OSError(5, "Input/output error")
        return DiskSpace(100 * GIB, 50 * GIB, 0, 0)

    (tmp_path / "data").mkdir()
    look = look_at(tmp_path, {}, room_paths=(Path("/state/logs"), Path("/data")))
    found = {one.subject: one for one in disk_space.folders(look, ask)}
    assert states(found.values()) == {"/tmp": "ok", "/state/logs": "ok", "/data": "unknown"}
    assert asked == [tmp_path, tmp_path, tmp_path / "data"]


@pytest.mark.parametrize(
    ("own_limits", "has_adapter", "said"),
    [
        (ProcessLimits(-1, -1, -1), True, ""),
        (ProcessLimits(1 << 20, 1 << 20, 65536), False, ""),
        (ProcessLimits(1024, -1, -1), False, "only 1024 open files (least 4096); ulimit -n 65536"),
        (ProcessLimits(-1, 100, -1), False, "only 100 processes (least 4096); ulimit -u 65536"),
        (ProcessLimits(-1, -1, 65536), True, "only 64 KiB may be locked"),
    ],
)
def test_narrow_limits_are_a_warning(
    tmp_path: Path, own_limits: ProcessLimits, has_adapter: bool, said: str
) -> None:
    if has_adapter:
        (tmp_path / "sys/class/infiniband").mkdir(parents=True)
    (one,) = limits.limits(look_at(tmp_path, {}), lambda: own_limits)
    assert one.state == ("warning" if said else "ok")
    assert said in one.reason


def test_load_and_zombies_past_their_limits_are_warnings(tmp_path: Path) -> None:
    files = {"proc/loadavg": "1 5000.5 3 1/2 3\n", "proc/version": "Linux\n"}
    files |= {f"proc/{pid}/stat": f"{pid} (a) b) Z 1 1\n" for pid in range(5, 9)}
    files |= {"proc/4/stat": "4 (Z) S 1 1\n", "proc/3/other": ""}
    look = look_at(tmp_path, files, zombies_limit=3)
    (load,) = limits.load(look)
    (zombies,) = limits.zombies(look)
    assert (load.state, zombies.state) == ("warning", "warning")
    assert "4 zombies, which their parents have not reaped (limit 3)" in zombies.reason
    (zombies,) = limits.zombies(look_at(tmp_path, {}, zombies_limit=4))
    assert zombies.state == "ok"


def test_an_empty_host_supports_nothing_and_fails_nothing(tmp_path: Path) -> None:
    found = list(HostProbe().examine(look_at(tmp_path, {})))
    assert not {"failed", "unknown"} & set(states(found).values())
    of = states(found)
    missing = {"memory", "memory pressure", "memory kills", "memory errors", "load"}
    assert {of[subject] for subject in missing} == {"unsupported"}


@pytest.mark.parametrize("text", ["", "N/A\n", "MemTotal: x kB\nMemAvailable:\n", "\0\0", "0 0 0"])
def test_garbage_is_unknown_and_spoils_nothing_else(tmp_path: Path, text: str) -> None:
    files = dict.fromkeys(
        [
            *["proc/meminfo", "proc/pressure/memory", "proc/vmstat"],
            "sys/devices/system/edac/mc/mc0/ue_count",
        ],
        text,
    )
    of = states(HostProbe().examine(look_at(tmp_path, files)))
    for subject in ("memory", "memory pressure", "memory kills"):
        assert of[subject] == "unknown"
    assert of["memory errors"] in {"unknown", "unsupported"}
    assert of["limits"] in {"ok", "warning"}


def test_this_very_host_can_be_examined() -> None:
    from everstep_services.agent.probes.base import Look

    found = list(HostProbe().examine(Look(settings=ChecksSettings())))
    assert len(found) >= 11
    assert "unknown" not in states(found).values()
