"""Limits the rate at which a save is written, so that it hardly slows the steps down.

To write a state takes a fixed amount of processor time and memory bandwidth. Spread over more
steps, it slows each step less. The slowdown is measured; without a slowdown there is no limit.
"""

import threading
import time
from collections import deque
from collections.abc import Collection

_MOST, _AIM, _LEAST = 0.04, 0.03, 0.01
"""The most slowdown of steps, the aim, and the slowdown below which a save may be faster."""
_FEWEST = 4
"""The least number of steps to judge by."""
_SHARE = 0.25
"""The most of the time between two saves that a save may take."""
_QUICKER = 1.5
_REPORTED_AGAIN = 2.0
LEAST_BYTES_PER_S = 4 << 20
"""A slower save looks like one that hangs."""


class Throttle:
    """Limits the bytes a second of a write, for all its threads together."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._began: float | None = None
        self._lifted = threading.Event()
        if not bytes_per_s:
            self.lift()

    @property
    def is_lifted(self) -> bool:
        """Whether there is no limit any more."""
        return self._lifted.is_set()

    def let(self, size: int) -> bool:
        """Wait until this many bytes in total are allowed; False once the limit is lifted."""
        if self.is_lifted:
            return False
        now = time.monotonic()
        if self._began is None:
            self._began = now
        ahead_s = size / self._bytes_per_s - (now - self._began)
        return not self._lifted.wait(max(ahead_s, 0.0))

    def lift(self) -> None:
        """Lift the limit."""
        self._lifted.set()


class WriteRate:
    """The rate at which the saves of a rank are written, by the measured slowdown of steps."""

    def __init__(self) -> None:
        self.lasts_s = 0.0
        """How long the next save takes; 0 for no limit."""
        self.slower = 1.0
        """How much longer a step took while the last save was written."""
        self._quiet: deque[float] = deque(maxlen=64)
        self._meanwhile: deque[float] = deque(maxlen=1024)
        self._lasted_s = 0.0
        self._stepped: float | None = None
        self._saved: float | None = None
        self._unslowed_s = 0.0
        """How long a save takes without a limit."""
        self._is_paced = False
        self._reported_s = 0.0

    def bytes_per_s(self, size: int) -> int:
        """The limit for the next save of this size; 0 for no limit."""
        return max(int(size / self.lasts_s), LEAST_BYTES_PER_S) if self.lasts_s else 0

    def news(self) -> str | None:
        """A line for people, if the limit has changed much since the last one."""
        lasts_s, reported_s = self.lasts_s, self._reported_s
        if lasts_s == reported_s or (
            lasts_s and 1 / _REPORTED_AGAIN < reported_s / lasts_s < _REPORTED_AGAIN
        ):
            return None
        self._reported_s = lasts_s
        if not lasts_s:
            return "saves are written without a limit again: steps do not slow down"
        return (
            f"saves are written over {lasts_s:.2g} s from now on: steps took {self.slower:.2f} "
            "times as long during a save (write_bytes_per_s=0: no limit)"
        )

    def stepped(self, now: float, *, is_saving: bool) -> None:
        """Note a finished step; `is_saving` if the last save is still being written."""
        before, self._stepped = self._stepped, now
        if before is None:
            return
        if is_saving:
            self._meanwhile.append(now - before)
            self._lasted_s += now - before
        else:
            self._quiet.append(now - before)

    def saved(self, now: float, *, is_paced: bool) -> None:
        """Note that a save begins, with a limit or not; the former save is over, or unlimited."""
        between_s = now - self._saved if self._saved is not None else 0.0
        if self._is_paced and min(len(self._quiet), len(self._meanwhile)) >= _FEWEST:
            self._judge(_SHARE * between_s)
        # The next step waits for the copy, so its time does not measure the write.
        self._saved, self._stepped, self._is_paced = now, None, is_paced
        self._meanwhile.clear()
        self._lasted_s = 0.0

    def _judge(self, most_s: float) -> None:
        self.slower = _usual(self._meanwhile) / _usual(self._quiet)
        excess = self.slower - 1
        if not self.lasts_s:
            self._unslowed_s = self._lasted_s
        if excess > _MOST:
            self.lasts_s = self._lasted_s * excess / _AIM
        elif excess < _LEAST:
            self.lasts_s /= _QUICKER
        self.lasts_s = min(self.lasts_s, most_s)
        if self.lasts_s <= self._unslowed_s:
            self.lasts_s = 0.0


def _usual(steps: Collection[float]) -> float:
    """The mean of the middle half, without outliers such as evaluations."""
    ordered = sorted(steps)
    aside = len(ordered) // 4
    middle = ordered[aside : len(ordered) - aside]
    return sum(middle) / len(middle)
