"""How long each part of the start took. An agent without services needs it, too."""

from everstep.clock import Clock


class Phases:
    """Marks the ends of phases; the first begins when this is made."""

    def __init__(self, clock: Clock, *, before_ms: float = 0.0) -> None:
        self._clock = clock
        self._last = clock.now()
        self.took_ms: dict[str, float] = {}
        if before_ms:
            self.took_ms["python"] = before_ms

    def end(self, name: str) -> float:
        """The phase that just ended, in milliseconds."""
        now = self._clock.now()
        self.took_ms[name] = round((now - self._last) * 1000)
        self._last = now
        return self.took_ms[name]

    @property
    def total_ms(self) -> float:
        """All phases so far."""
        return sum(self.took_ms.values())
