"""A time of day that a test steps, of the Python processes that it gives it to.

The kernel has one for the whole machine: no namespace moves it.
"""

import struct
from pathlib import Path

from tests.e2e.processes import ROOT

_HOOK = Path(__file__).with_name("stepped")


class WallClock:
    """It follows the machine's own until it is stepped."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.step_to(0)

    @property
    def environment(self) -> dict[str, str]:
        """Of the processes that it applies to, and of what they start."""
        return {"TEST_WALL_CLOCK": str(self._file), "PYTHONPATH": f"{_HOOK}:{ROOT}"}

    def step_to(self, ahead_s: int) -> None:
        """Let it be that much ahead of the machine's from now on."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("q", ahead_s))
