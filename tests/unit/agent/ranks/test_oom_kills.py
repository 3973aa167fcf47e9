"""Whether a SIGKILL was the kernel's, for lack of memory: by its counters, whatever their kind."""

from pathlib import Path

import pytest

from everstep_services.agent.core.exit import MemoryKill
from everstep_services.agent.ranks.oom_kills import KillCounts, MemoryKills, blame, kill_counts


def lay(root: Path, files: dict[str, str]) -> Path:
    """A root with these files."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def host(root: Path, cgroup: str) -> Path:
    """One that has killed 7 processes, with process 9 in these groups."""
    vmstat = "nr_free_pages 5\noom_kill 7\n"
    return lay(root, {"proc/vmstat": vmstat, "proc/9/cgroup": cgroup})


def test_a_group_of_the_second_version_counts_for_its_ranks(tmp_path: Path) -> None:
    events = "low 0\noom 4\noom_kill 2\noom_group_kill 1\n"
    host(tmp_path, "0::/job/7\n")
    lay(tmp_path, {"sys/fs/cgroup/job/7/memory.events": events})
    counts = kill_counts(9, tmp_path)
    assert (counts.group, counts.host) == (3, 7)
    assert counts.counted_by.endswith("job/7/memory.events")


def test_the_nearest_group_that_counts_is_taken(tmp_path: Path) -> None:
    host(tmp_path, "0::/job/7/step\n")
    lay(tmp_path, {"sys/fs/cgroup/job/memory.events": "oom_kill 2\n"})
    assert kill_counts(9, tmp_path).group == 2


@pytest.mark.parametrize("path", ["/docker/abc", "/", "/../../other"])
def test_a_container_that_sees_its_group_as_the_root(tmp_path: Path, path: str) -> None:
    host(tmp_path, f"5:cpu,cpuacct:/x\n4:memory:{path}\n0::/\n")
    control = "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"
    lay(tmp_path, {"sys/fs/cgroup/memory/memory.oom_control": control})
    assert kill_counts(9, tmp_path) == KillCounts(
        5, 7, str(tmp_path / "sys/fs/cgroup/memory/memory.oom_control")
    )


@pytest.mark.parametrize("cgroup", ["0::/\n", "", "nonsense", "4:memory"])
def test_where_no_group_counts_the_host_does(tmp_path: Path, cgroup: str) -> None:
    assert kill_counts(9, host(tmp_path, cgroup)) == KillCounts(None, 7)


def test_where_nothing_can_be_read_nothing_is_said(tmp_path: Path) -> None:
    assert kill_counts(9, tmp_path) == KillCounts()
    lay(tmp_path, {"proc/vmstat": "oom_kill many\n", "proc/9/cgroup": "0::/a\n"})
    assert kill_counts(9, tmp_path) == KillCounts()


@pytest.mark.parametrize(
    ("before", "now", "found"),
    [
        (KillCounts(1, 5, "a"), KillCounts(2, 6, "a"), "rank"),
        (KillCounts(1, 5, "a"), KillCounts(1, 6, "a"), ""),  # it was somebody else's
        (KillCounts(1, 5, "a"), KillCounts(2, 5, "b"), ""),  # two groups cannot be compared
        (KillCounts(None, 5), KillCounts(None, 6), "host"),
        (KillCounts(None, 5), KillCounts(None, 5), ""),
        (KillCounts(), KillCounts(None, 6), ""),
        (KillCounts(), KillCounts(), ""),
    ],
)
def test_who_is_to_blame(before: KillCounts, now: KillCounts, found: MemoryKill) -> None:
    assert blame(before, now) == found


class Kernel:
    """Counts as the test says."""

    def __init__(self) -> None:
        self.killed = 3

    def __call__(self) -> KillCounts:
        return KillCounts(self.killed, None, "a")


async def test_only_what_was_killed_lately_counts() -> None:
    kernel = Kernel()
    kills = MemoryKills(kernel)
    await kills.begin(1000)
    assert await kills.blame() == ""
    kernel.killed += 1  # a data worker, say
    await kills.look(1059)
    assert await kills.blame() == "rank"
    assert await kills.blame() == "rank"  # of several ranks that went together
    await kills.look(1060)
    assert await kills.blame() == "rank"  # a large process may take its time to go
    await kills.look(1119)
    assert await kills.blame() == "rank"
    await kills.look(1120)
    assert await kills.blame() == ""
    kernel.killed += 1
    await kills.begin(1130)
    assert await kills.blame() == ""


async def test_before_anything_was_counted_nobody_is_blamed() -> None:
    assert await MemoryKills(Kernel()).blame() == ""
