"""How often to save: the formula, and its effect in a simulated training."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.checkpoint.schedule.interval import (
    Every,
    IntervalBounds,
    IntervalEstimate,
    best_interval_s,
    mtbf_s,
    parse_every,
)

DAY_S = 86400.0
BOUNDS = IntervalBounds(least_s=30, most_s=3600)


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        (500, Every(steps=500)),
        ("10min", Every(seconds=600)),
        ("90s", Every(seconds=90)),
        ("1.5 h", Every(seconds=5400)),
        ("auto", Every()),
        ("always", Every(most_share=0.01)),
    ],
)
def test_an_interval_is_steps_a_time_or_automatic(said: int | str, meant: Every) -> None:
    assert parse_every(said) == meant


@pytest.mark.parametrize("said", [0, -5, "", "10", "ten minutes", "0s", "5 days"])
def test_an_invalid_interval_is_refused_with_valid_examples(said: int | str) -> None:
    with pytest.raises(ValueError, match="give a number of steps, a time as '10min'"):
        parse_every(said)


def test_the_best_interval_is_youngs_where_saves_are_cheap() -> None:
    assert best_interval_s(0.1, DAY_S) == pytest.approx(math.sqrt(2 * 0.1 * DAY_S), rel=1e-3)


@given(st.floats(0.001, 100), st.floats(600, 1e6))
def test_no_other_interval_loses_notably_less_time(cost_s: float, mtbf: float) -> None:
    def lost(interval_s: float) -> float:
        """The lost share of time: the cost of saves, and half an interval for each failure."""
        return cost_s / interval_s + (interval_s / 2 + cost_s) / mtbf

    best = best_interval_s(cost_s, mtbf)
    assert all(lost(best) <= lost(best * other) * 1.05 for other in (0.3, 0.5, 0.8, 1.3, 2, 4))


def test_a_job_without_failures_is_assumed_to_fail_once_a_day() -> None:
    assert mtbf_s(0, 0) == DAY_S
    assert mtbf_s(9, 9 * 3600) == pytest.approx(3.3 * 3600)
    assert mtbf_s(0, 9 * DAY_S) == 10 * DAY_S


def train(
    estimate: IntervalEstimate,
    steps: int,
    *,
    step_s: float,
    stall_s: float,
    drain_s: float = 0,
    slower: float = 1,
) -> tuple[list[float], list[int]]:
    """The times of saves, and the steps at which ranks had to ask."""
    now, next_look, drained = 0.0, 0, -1.0
    saved, looks = [], []
    for step in range(steps):
        is_saving = now < drained
        now += step_s * (slower if is_saving else 1)
        estimate.stepped(now, is_saving=is_saving)
        if step < next_look:
            continue
        look = estimate.look(step, now)
        looks.append(step)
        assert look.next_step > step
        next_look = look.next_step
        if look.is_due:
            saved.append(now)
            now += stall_s
            estimate.saved(now, stall_s)
            drained = now + drain_s
    return saved, looks


def test_a_time_interval_is_met_within_half_a_step_with_few_queries() -> None:
    estimate = IntervalEstimate(Every(seconds=60), BOUNDS, failures=0, ran_s=0)
    saved, looks = train(estimate, 2000, step_s=0.7, stall_s=0.1)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert len(gaps) > 15
    assert all(abs(gap - 60) < 1.5 for gap in gaps)
    assert len(looks) < 3 * len(saved) + 20


def test_the_automatic_interval_follows_the_stall_and_the_failures_and_names_them() -> None:
    estimate = IntervalEstimate(Every(), BOUNDS, failures=23, ran_s=11 * DAY_S)
    saved, _ = train(estimate, 40_000, step_s=0.5, stall_s=0.2)
    chosen = estimate.interval(saved[-1])
    assert chosen.stall_s == pytest.approx(0.2)
    assert chosen.every_s == pytest.approx(
        math.sqrt(2 * 0.2 * (12 * DAY_S + saved[-1]) / 24), rel=0.02
    )
    assert saved[-1] - saved[-2] == pytest.approx(chosen.every_s, rel=0.05)
    assert "23 failures" in chosen.reason
    assert "0.2 s stall" in chosen.reason


def test_steps_that_a_save_slows_down_count_as_its_cost() -> None:
    estimate = IntervalEstimate(Every(), BOUNDS, failures=0, ran_s=0)
    saved, _ = train(estimate, 20_000, step_s=0.5, stall_s=0.1, drain_s=10, slower=1.2)
    # 10 s of steps that take 0.6 s each lose 0.1 s each: 1.7 s in all
    cost_s = 0.1 + 10 / 0.6 * 0.1
    expected = best_interval_s(cost_s, mtbf_s(0, saved[-1]))
    assert estimate.interval(saved[-1]).every_s == pytest.approx(expected, rel=0.1)


def test_it_never_asks_for_saves_faster_than_they_can_be_written() -> None:
    estimate = IntervalEstimate(Every(), BOUNDS, failures=500, ran_s=0)
    saved, _ = train(estimate, 20_000, step_s=0.5, stall_s=0.001, drain_s=100)
    chosen = estimate.interval(saved[-1])
    assert chosen.every_s >= 200
    assert "the nearest allowed" in chosen.reason


def always(
    steps: int, *, stall_s: float, drain_s: float, slower: float = 1
) -> tuple[list[float], float]:
    """The times of saves, and the share of the time that they cost."""
    estimate = IntervalEstimate(parse_every("always", 0.01), BOUNDS, failures=0, ran_s=0)
    saved, looks = train(
        estimate, steps, step_s=0.5, stall_s=stall_s, drain_s=drain_s, slower=slower
    )
    assert len(looks) < 20 * len(saved)
    cost_s = stall_s + drain_s * (1 - 1 / slower)
    return saved, cost_s * len(saved) / saved[-1]


@pytest.mark.parametrize("drain_s", [0.1, 4.0, 100.0])
def test_always_saves_again_as_soon_as_the_last_save_is_durable(drain_s: float) -> None:
    """What a failure loses is never more than two writes and two steps."""
    saved, cost = always(8_000, stall_s=0.001, drain_s=drain_s)
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert max(gaps[1:]) <= 1.25 * drain_s + 3 * 0.5
    assert cost < 0.01


@pytest.mark.parametrize(("stall_s", "slower"), [(0.2, 1.0), (0.001, 1.3)])
def test_always_leaves_pauses_so_that_saves_cost_no_more_than_allowed(
    stall_s: float, slower: float
) -> None:
    _, cost = always(40_000, stall_s=stall_s, drain_s=5.0, slower=slower)
    assert 0.008 < cost < 0.0115


def test_before_anything_is_measured_the_least_interval_holds() -> None:
    estimate = IntervalEstimate(Every(), BOUNDS, failures=0, ran_s=0)
    saved, _ = train(estimate, 100, step_s=1, stall_s=0.1)
    assert saved[0] == pytest.approx(31, abs=1)


def test_a_changed_interval_is_reported_once() -> None:
    estimate = IntervalEstimate(Every(), BOUNDS, failures=0, ran_s=0)
    estimate.stepped(1, is_saving=False)
    estimate.stepped(2, is_saving=False)
    assert estimate.news(2) is not None
    assert estimate.news(3) is None
    estimate.saved(4, 5.0)
    changed = estimate.news(4)
    assert changed is not None
    assert changed.stall_s == 5
    assert estimate.news(5) is None
