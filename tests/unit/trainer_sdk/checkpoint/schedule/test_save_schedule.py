"""All ranks save after the same steps, even if their measurements differ."""

import random
import threading
from collections.abc import Callable

import pytest

from tests.unit.trainer_sdk.checkpoint.saved_states import KeptReports, together
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.schedule import save_schedule
from trainer_sdk.checkpoint.schedule.interval import IntervalBounds, IntervalEstimate, parse_every
from trainer_sdk.checkpoint.schedule.save_schedule import SaveSchedule


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, float], None]:
    """Each rank's clock is its own."""
    now = threading.local()
    monkeypatch.setattr(save_schedule, "monotonic", lambda: now.s)

    def move(rank: int, by_s: float) -> None:
        now.s = getattr(now, "s", 1000.0 * rank) + by_s

    return move


def saved_by(
    every: int | str, clocks: Callable[[int, float], None], told: KeptReports, steps: int
) -> list[list[int]]:
    def train(group: RankGroup) -> list[int]:
        wanted = parse_every(every)
        estimate = IntervalEstimate(wanted, IntervalBounds(), failures=group.rank * 10, ran_s=0)
        paced = SaveSchedule(wanted, group, told, estimate)
        chance, saved = random.Random(group.rank), []
        for step in range(1, steps + 1):
            clocks(group.rank, chance.uniform(0.5, 1.5) * (1 + group.rank))
            if paced.is_due(step, is_saving=chance.random() < 0.3):
                saved.append(step)
                paced.saved(chance.random())
        return saved

    return together(2, train)


@pytest.mark.parametrize("every", ["auto", "always", "1min", 7])
def test_ranks_with_clocks_of_their_own_save_after_the_same_steps(
    every: int | str, clocks: Callable[[int, float], None]
) -> None:
    first, second = saved_by(every, clocks, KeptReports(), 600)
    assert first == second
    assert len(first) >= 2


def test_only_rank_0_reports_the_interval_and_only_if_it_is_chosen(
    clocks: Callable[[int, float], None],
) -> None:
    told = KeptReports()
    saved_by(7, clocks, told, 50)
    assert told.events == []
    saved_by("auto", clocks, told, 600)
    assert {event for event, _ in told.events} == {"interval"}
    assert told.events[0][1]["tier"] == "global"
    assert "(0 failures" in told.events[0][1]["reason"]
    assert all("saving every" in line for line in told.warned)


def test_a_training_that_has_gone_back_saves_again_without_waiting_for_the_step_it_was_at(
    clocks: Callable[[int, float], None],
) -> None:
    every = parse_every("10s")
    estimate = IntervalEstimate(every, IntervalBounds(), failures=0, ran_s=0)
    schedule = SaveSchedule(every, RankGroup(None), KeptReports(), estimate)
    due: list[int] = []
    for step in [*range(1, 50), *range(10, 30)]:
        if due and step == 10:
            schedule.gone_back()
        clocks(0, 1.0)
        if schedule.is_due(step, is_saving=False):
            due.append(step)
            schedule.saved(0.0)
    assert due[-1] - due[-2] == 10
    assert due[-1] < 30
