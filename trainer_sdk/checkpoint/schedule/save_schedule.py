"""When to save: all ranks decide alike, by steps alone or by what rank 0 says at some of them."""

from dataclasses import asdict
from time import monotonic

from trainer_sdk.checkpoint.events import Teller
from trainer_sdk.checkpoint.group import Group
from trainer_sdk.checkpoint.schedule.interval import Every, Look, Pace


class Pacing:
    """Asked after each step, by all ranks."""

    def __init__(self, every: Every, group: Group, teller: Teller, pace: Pace) -> None:
        self._every = every
        self._group = group
        self._teller = teller
        self._pace = pace
        self._next = 0

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Whether all ranks save after this step."""
        if self._every.steps is not None:
            return step % self._every.steps == 0
        now = monotonic()
        self._pace.stepped(now, is_saving=is_saving)
        if step < self._next:
            return False
        look = self._group.follow(self._pace.look(step, now), Look)
        if look.step != step:
            raise ValueError(
                f"rank {self._group.rank} has finished step {step}, and rank 0 step {look.step}: "
                "have all ranks call step with the same number"
            )
        self._next = look.next_step
        return look.is_due

    def saved(self, stall_s: float) -> None:
        """A save was begun; it took so much of the training's time on this rank."""
        now = monotonic()
        self._pace.saved(now, stall_s)
        if self._every.steps is not None or self._group.rank:
            return
        news = self._pace.news(now)
        if news is not None:
            self._teller.tell("interval", tier="global", **asdict(news))
            self._teller.warn(
                f"saving every {news.every_s:.4g} s, {news.every_steps} steps: {news.reason}"
            )
