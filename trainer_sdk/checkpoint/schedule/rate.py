"""How long a save is to take, so that the steps meanwhile do not notice it. Pure.

To write a state costs processor time and memory bandwidth, the same in a moment or in a while: of
more steps, each pays less. What a step pays is measured, and nothing is slowed that costs nothing.
"""

import threading
import time
from collections import deque
from collections.abc import Collection

_MOST, _AIM, _LEAST = 0.04, 0.03, 0.01
"""By so much steps may take longer; what is aimed at; and what there is room for more."""
_FEWEST = 4
"""Steps, before anything is concluded from them."""
_SHARE = 0.25
"""So much of the time between two saves one may take."""
_QUICKER = 1.5
_TOLD_ANEW = 2.0
LEAST_BYTES_PER_S = 4 << 20
"""A save that is slower looks like one that hangs."""


class Throttle:
    """Of one piece of work, for all its threads; its time begins with the first bytes."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._began: float | None = None
        self._lifted = threading.Event()
        if not bytes_per_s:
            self.lift()

    @property
    def is_lifted(self) -> bool:
        """Nobody waits here."""
        return self._lifted.is_set()

    def let(self, size: int) -> bool:
        """Wait until so many bytes may have passed in all; False once it is lifted."""
        if self.is_lifted:
            return False
        now = time.monotonic()
        if self._began is None:
            self._began = now
        ahead_s = size / self._bytes_per_s - (now - self._began)
        return not self._lifted.wait(max(ahead_s, 0.0))

    def lift(self) -> None:
        """Nobody waits here from now on."""
        self._lifted.set()


class WriteRate:
    """Of one rank."""

    def __init__(self) -> None:
        self.lasts_s = 0.0
        """What the next save is to take; 0: as fast as can be."""
        self.slower = 1.0
        """A step while the last one was written, in steps before it."""
        self._quiet: deque[float] = deque(maxlen=64)
        self._meanwhile: deque[float] = deque(maxlen=1024)
        self._lasted_s = 0.0
        self._stepped: float | None = None
        self._saved: float | None = None
        self._unslowed_s = 0.0
        """What a save takes that nobody slows."""
        self._is_paced = False
        self._told_s = 0.0

    def bytes_per_s(self, size: int) -> int:
        """How fast the next save of this size may be written; 0: as fast as can be."""
        return max(int(size / self.lasts_s), LEAST_BYTES_PER_S) if self.lasts_s else 0

    def news(self) -> str | None:
        """What people should know, if it has changed much since it was told."""
        lasts_s, told_s = self.lasts_s, self._told_s
        if lasts_s == told_s or (lasts_s and 1 / _TOLD_ANEW < told_s / lasts_s < _TOLD_ANEW):
            return None
        self._told_s = lasts_s
        if not lasts_s:
            return "saves are written as fast as can be again: steps do not notice it"
        return (
            f"saves are written within {lasts_s:.2g} s from now on, and no faster: steps took "
            f"{self.slower:.2f} times as long meanwhile (write_bytes_per_s=0: as fast as can be)"
        )

    def stepped(self, now: float, *, is_saving: bool) -> None:
        """A step is finished; `is_saving` while the last save is still being written."""
        before, self._stepped = self._stepped, now
        if before is None:
            return
        if is_saving:
            self._meanwhile.append(now - before)
            self._lasted_s += now - before
        else:
            self._quiet.append(now - before)

    def saved(self, now: float, *, is_paced: bool) -> None:
        """A save begins, which may be slowed or not. The one before is over, or hurries."""
        between_s = now - self._saved if self._saved is not None else 0.0
        if self._is_paced and min(len(self._quiet), len(self._meanwhile)) >= _FEWEST:
            self._judge(_SHARE * between_s)
        # The next step waits for what is still being copied, and says nothing of the writing.
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
    """The mean of the middle half: neither a step that evaluates nor a burst of writes decides."""
    ordered = sorted(steps)
    aside = len(ordered) // 4
    middle = ordered[aside : len(ordered) - aside]
    return sum(middle) / len(middle)
