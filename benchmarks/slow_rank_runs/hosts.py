"""Hosts on one machine: control groups, each with a share of the processors."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil

from tests.waiting import until

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 50_000
_HOG = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
"""Ends with us, however we end."""


class Host:
    """All processes in it together have this number of processors."""

    def __init__(self, name: str, cores: float | None) -> None:
        has_own_tree = (_ROOT / "cpu/cpu.shares").exists()
        self.folder = (_ROOT / "cpu" if has_own_tree else _ROOT) / f"everstep-{os.getpid()}-{name}"
        try:
            if not has_own_tree:
                (_ROOT / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir()
        except OSError as error:
            raise SystemExit(f"no control group can be made here ({error}): run as root") from error
        if cores is None:
            return
        quota_us = int(cores * _PERIOD_US)
        if has_own_tree:
            (self.folder / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (self.folder / "cpu.cfs_quota_us").write_text(str(quota_us))
        else:
            (self.folder / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")

    @property
    def entering(self) -> tuple[str, ...]:
        """A program that runs here the command which it is given."""
        enter = f'echo $$ > {self.folder}/cgroup.procs && exec "$@"'
        return ("sh", "-c", enter, "sh")

    def remove(self) -> None:
        def removed() -> bool:
            self.folder.rmdir()
            return True

        until(removed, f"{self.folder} is empty", despite=OSError)


@contextmanager
def hosts(names: list[str], cores: float | None) -> Iterator[dict[str, Host]]:
    """Limit it to this number of processors, until all that runs there has ended."""
    with ExitStack() as stack:
        found = {}
        for name in names:
            found[name] = Host(name, cores)
            stack.callback(found[name].remove)
        yield found


@contextmanager
def hogs(host: Host, count: int, nice: int = 0, processor: int | None = None) -> Iterator[None]:
    """Other programs compute on a host."""
    started = []
    try:
        for _ in range(count):
            command = [*host.entering, sys.executable, "-c", _HOG]
            hog = subprocess.Popen(command, start_new_session=True)
            started.append(hog)
            os.setpriority(os.PRIO_PROCESS, hog.pid, nice)
            if processor is not None:
                os.sched_setaffinity(hog.pid, [processor])
        yield
    finally:
        for hog in started:
            hog.kill()
            hog.wait()


@contextmanager
def low_priority(pid: int, nice: int, processor: int) -> Iterator[None]:
    """All threads of a process, on one processor."""
    usual = os.sched_getaffinity(pid)
    _arrange(pid, nice, {processor})
    try:
        yield
    finally:
        _arrange(pid, 0, usual)


def _arrange(pid: int, nice: int, processors: set[int]) -> None:
    for thread in psutil.Process(pid).threads():
        os.setpriority(os.PRIO_PROCESS, thread.id, nice)
        os.sched_setaffinity(thread.id, processors)
