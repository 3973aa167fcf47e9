"""How far the training is, as facts tell it: the first step, once a minute, the last."""

from dataclasses import dataclass

from everstep.clock import Clock

_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Made:
    """Steps that were made since it was said last."""

    step: int
    is_first: bool
    steps: int
    steps_s: float


class Steps:
    """Of one round at a time."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._said_at = clock.now()
        self._said_step = 0

    def begins(self) -> None:
        """A round begins."""
        self._said_at = self._clock.now()
        self._said_step = 0

    def first(self, step: int) -> Made | None:
        """A rank has made its first step of the round."""
        if self._said_step:
            return None
        return self._made(step, is_first=True, steps=1)

    def since(self, step: int | None, *, is_last: bool = False) -> Made | None:
        """What is to be said by now; at the end of a round, all that was not said yet."""
        is_due = is_last or self._clock.now() - self._said_at >= _EVERY_S
        if not is_due or step is None or not 0 < self._said_step < step:
            return None
        return self._made(step, is_first=False, steps=step - self._said_step)

    def _made(self, step: int, *, is_first: bool, steps: int) -> Made:
        now = self._clock.now()
        took_s, self._said_at, self._said_step = now - self._said_at, now, step
        return Made(step, is_first, steps, took_s)
