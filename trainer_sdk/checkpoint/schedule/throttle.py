"""No more bytes a second than are allowed."""

import threading
import time


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
