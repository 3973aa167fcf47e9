"""For how long we have been able to hear: a clock that stands still while we are blind."""


class SightedClock:
    """The observer's monotonic clock without the time in which it heard nobody.

    Silence in it is silence that was witnessed. Read it often: whoever did not read it for longer
    than `pause_s` was stopped, or had no turn, and whatever was said meanwhile still waits in a
    queue.
    """

    def __init__(self, pause_s: float) -> None:
        self._most_s = pause_s
        self._awake_at: float | None = None
        self._ticked_s = 0.0
        self.blind_s = 0.0

    def read(self, now: float) -> float:
        """Sighted seconds."""
        if self._awake_at is not None and now - self._awake_at > self._most_s:
            self.blind_s += now - self._awake_at
        self._awake_at = now
        return now - self.blind_s

    def tick(self, now: float, *, is_blind: bool) -> float:
        """Sighted seconds, once a tick; with `is_blind` they have not gone on since the last."""
        seen_s = self.read(now)
        if is_blind and seen_s > self._ticked_s and self._ticked_s:
            self.blind_s += seen_s - self._ticked_s
            seen_s = self._ticked_s
        self._ticked_s = seen_s
        return seen_s
