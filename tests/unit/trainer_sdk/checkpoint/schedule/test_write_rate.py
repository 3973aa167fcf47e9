"""The write rate of saves, for simulated trainings whose slowdown by writing is known."""

from dataclasses import dataclass, field

import pytest

from trainer_sdk.checkpoint.schedule.write_rate import LEAST_BYTES_PER_S, WriteRate

GIB = 1 << 30
STEP_S = 0.1


@dataclass
class Training:
    """A training whose steps take `costs_s` longer for each save, spread over its steps."""

    costs_s: float
    full_s: float = 1.0
    """What a save takes that nobody slows."""
    every_s: float = 100.0
    rate: WriteRate = field(default_factory=WriteRate)
    now: float = 0.0
    slower: float = 1.0
    """Of the steps during the last save."""

    def save(self, *, is_paced: bool = True) -> None:
        """Save, and make all steps until the next save is due."""
        self.rate.saved(self.now, is_paced=is_paced)
        lasts_s = max(self.rate.lasts_s, self.full_s)
        self.slower = 1 + self.costs_s / lasts_s
        ends = self.now + self.every_s
        written = self.now + lasts_s
        self.step(2 * STEP_S, is_saving=True)  # the copy
        while self.now < ends:
            is_saving = self.now < written
            self.step(STEP_S * (self.slower if is_saving else 1), is_saving=is_saving)

    def step(self, took_s: float, *, is_saving: bool) -> None:
        self.now += took_s
        self.rate.stepped(self.now, is_saving=is_saving)


def test_a_save_that_slows_steps_down_is_spread_until_it_does_not() -> None:
    training = Training(costs_s=0.18)
    training.save()
    assert (training.rate.lasts_s, training.slower) == (0, 1.18)
    training.save()
    assert training.rate.slower == pytest.approx(1.18)
    lasted = []
    for _ in range(10):
        training.save()
        lasted.append(training.rate.lasts_s)
        assert 1.01 <= training.slower <= 1.05
    assert max(lasted) - min(lasted) < 0.1 * max(lasted), "it comes to rest"


def test_a_save_without_slowdown_has_no_limit() -> None:
    training = Training(costs_s=0.01)
    for _ in range(5):
        training.save()
        assert training.rate.lasts_s == 0


def test_the_limit_ends_once_steps_do_not_slow_down() -> None:
    training = Training(costs_s=0.3)
    for _ in range(3):
        training.save()
    assert training.rate.lasts_s > 5
    training.costs_s = 0.0
    for _ in range(8):
        training.save()
    assert training.rate.lasts_s == 0


def test_a_write_takes_at_most_a_quarter_of_the_time_between_saves() -> None:
    training = Training(costs_s=3.0, full_s=3.0, every_s=40.0)
    for _ in range(5):
        training.save()
    assert training.rate.lasts_s == pytest.approx(10, rel=0.1)


def test_steps_as_long_as_a_save_do_not_change_the_rate() -> None:
    training = Training(costs_s=0.5, full_s=3 * STEP_S)
    for _ in range(5):
        training.save()
    assert training.rate.lasts_s == 0


def test_saves_that_the_training_waits_for_do_not_change_the_rate() -> None:
    training = Training(costs_s=0.5)
    for _ in range(5):
        training.save(is_paced=False)
    assert training.rate.lasts_s == 0


def test_a_single_long_step_does_not_change_the_rate() -> None:
    training = Training(costs_s=0.0)
    training.save()
    training.rate.saved(training.now, is_paced=True)
    for number in range(20):
        training.step(STEP_S * (30 if number == 10 else 1), is_saving=True)
    training.save()
    assert training.rate.lasts_s == 0


def test_the_rate_follows_from_time_and_size() -> None:
    rate = WriteRate()
    assert rate.bytes_per_s(GIB) == 0
    rate.lasts_s = 4.0
    assert rate.bytes_per_s(GIB) == GIB // 4
    assert rate.bytes_per_s(100) == LEAST_BYTES_PER_S, "what is slower looks like a hang"


def test_a_large_change_of_the_rate_is_printed() -> None:
    rate = WriteRate()
    assert rate.news() is None
    rate.lasts_s, rate.slower = 4.0, 1.18
    assert rate.news() == (
        "saves are written over 4 s from now on: steps took 1.18 times as long during a save "
        "(write_bytes_per_s=0: no limit)"
    )
    rate.lasts_s = 5.0
    assert rate.news() is None
    rate.lasts_s = 0.0
    assert rate.news() == "saves are written without a limit again: steps do not slow down"
    assert rate.news() is None
