"""Processes that are stopped as they stand."""

import os
import signal
from pathlib import Path

from tests.waiting import until


def stop(pid: int) -> None:
    """Until none of its threads runs any more: SIGSTOP alone has not happened when it was sent."""
    assert pid > 1, "0 is everybody of this group"
    os.kill(pid, signal.SIGSTOP)
    until(
        lambda: _states(pid),
        "all threads have stopped",
        holds=lambda found: found == {"T"},
        despite=FileNotFoundError,  # one of them has just ended
    )


def _states(pid: int) -> set[str]:
    stats = (path / "stat" for path in Path(f"/proc/{pid}/task").iterdir())
    return {stat.read_text().rpartition(")")[2].split()[0] for stat in stats}
