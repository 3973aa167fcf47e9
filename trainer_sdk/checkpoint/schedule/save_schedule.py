"""Decides when to save: all ranks alike, by the step number, or by rank 0's decision."""

from dataclasses import asdict
from time import monotonic

from trainer_sdk.checkpoint.events import IntervalEvent, Reporter
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.schedule.interval import Every, IntervalEstimate, SaveDecision


class SaveSchedule:
    """Decides after each step whether to save. All ranks call it together."""

    def __init__(
        self, every: Every, group: RankGroup, reporter: Reporter, estimate: IntervalEstimate
    ) -> None:
        self._every = every
        self._group = group
        self._reporter = reporter
        self._estimate = estimate
        self._next = 0

    def is_due(self, step: int, *, is_saving: bool) -> bool:
        """Whether all ranks save after this step."""
        if self._every.steps is not None:
            return step % self._every.steps == 0
        now = monotonic()
        self._estimate.stepped(now, is_saving=is_saving)
        if step < self._next:
            return False
        look = self._group.follow(self._estimate.look(step, now), SaveDecision)
        if look.step != step:
            raise ValueError(
                f"rank {self._group.rank} has finished step {step}, and rank 0 step {look.step}: "
                "have all ranks call step with the same number"
            )
        self._next = look.next_step
        return look.is_due

    def gone_back(self) -> None:
        """Ask again after the next step: the training has gone back to an earlier one."""
        self._next = 0

    def saved(self, stall_s: float) -> None:
        """Note a save that was begun, and the training's time that it took on this rank."""
        now = monotonic()
        self._estimate.saved(now, stall_s)
        if self._every.steps is not None or self._group.rank:
            return
        news = self._estimate.news(now)
        if news is not None:
            self._reporter.report(IntervalEvent(**asdict(news)))
            self._reporter.warn(
                f"saving every {news.every_s:.4g} s, {news.every_steps} steps: {news.reason}"
            )
