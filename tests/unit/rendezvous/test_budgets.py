"""Another round, when, or the end."""

from typing import Any

import pytest

from everstep_services.rendezvous.domain.budgets import (
    RestartDecision,
    RestartHistory,
    RestartRules,
    RoundFailure,
    judge,
)
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.unit.rendezvous.world import spec

SETTINGS = RendezvousSettings()


CANNOT_START: dict[str, object] = {"is_of_code": True, "is_on_all_ranks": True}


def failure(**fields: object) -> RoundFailure:
    values = {
        "cause": "rank_exited",
        "lived_s": 2.0,
        "steps_s": 0.0,
        "step": None,
        "fingerprint": "f",
        "exit_code": 1,
    }
    return RoundFailure(**(values | fields))  # type: ignore[arg-type]


def run(
    failures: list[RoundFailure],
    may_stop: bool = False,
    may_stop_start: bool = False,
    **limits: Any,
) -> list[RestartDecision]:
    past, found = RestartHistory(), []
    for one in failures:
        rules = RestartRules(
            spec(**limits), SETTINGS, may_stop=may_stop, may_stop_start=may_stop_start
        )
        judged = judge(one, past, rules)
        found.append(judged)
        past = judged.past
        if judged.action == "stop":
            break
    return found


def test_the_budget_is_the_number_of_restarts() -> None:
    """Three restarts are allowed, and three are made (A5.5)."""
    found = run([failure(fingerprint=f"{n}", lived_s=100) for n in range(9)], max_restarts=3)
    assert [one.action for one in found] == ["restart"] * 3 + ["stop"]
    assert (found[-1].exit_code, found[-1].rule) == (1, "stop.restarts_spent")
    assert found[2].budgets[0].left == 0


def test_without_a_budget_there_is_no_restart() -> None:
    assert [one.action for one in run([failure()], max_restarts=0)] == ["stop"]


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "restarts have no limit"),
        ({"launcher": "torchrun"}, "torchrun counts restarts itself (its limit is not known)"),
        (
            {"launcher": "torchrun", "launcher_restarts": 10},
            "torchrun counts restarts itself (at most 10 on each node)",
        ),
    ],
)
def test_a_job_without_a_budget_names_who_limits_its_restarts(
    fields: dict[str, Any], text: str
) -> None:
    (found,) = run([failure(lived_s=100)], **fields)
    assert found.reason == text


def test_the_budget_of_an_hour_counts_on_its_own() -> None:
    found = run([failure(fingerprint=f"{n}") for n in range(5)], max_restarts_per_hour=2)
    assert [one.action for one in found] == ["restart", "restart", "stop"]


@pytest.mark.parametrize("cause", ["operator", "grow", "preempted"])
def test_what_is_nobodys_failure_costs_nothing(cause: str) -> None:
    found = run([failure(cause=cause) for _ in range(5)], max_restarts=1)
    assert {one.action for one in found} == {"restart"}


def test_steady_progress_gives_restarts_back() -> None:
    """With progress the budget refills; without it a restart is the last (A4.2)."""
    far = [failure(step=100 * n, steps_s=1800.0, lived_s=2000, fingerprint="") for n in range(1, 9)]
    assert {one.action for one in run(far, max_restarts=1)} == {"restart"}
    still = [failure(step=100, steps_s=1800.0, lived_s=2000, fingerprint="") for _ in range(3)]
    assert run(still, max_restarts=1)[-1].action == "stop"


def test_a_crash_loop_is_slowed_down_to_six_restarts_in_ten_minutes() -> None:
    """Rounds of 2 s: the delay grows from 5 s to 300 s (A4.3)."""
    found = run([failure(fingerprint="") for _ in range(9)])
    assert [one.delay_s for one in found[:7]] == [0, 5, 15, 45, 135, 300, 300]
    at, times = 0.0, []
    for one in found:
        at += 2 + one.delay_s
        times.append(at)
    assert sum(time < 600 for time in times) <= 6
    assert found[1].rule == "restart.backoff"


def test_lost_nodes_are_no_crash_loop() -> None:
    found = run([failure(cause="node_lost", fingerprint="") for _ in range(5)])
    assert {one.delay_s for one in found} == {0}


@pytest.mark.parametrize("step", [None, 7])
def test_the_same_failure_twice_is_confirmed_once_and_then_advised_against(
    step: int | None,
) -> None:
    """One more try, then advice, or the stop that was asked for (A4.1)."""
    found = run([failure(step=step) for _ in range(2)])
    assert [one.action for one in found] == ["restart", "restart"]
    assert found[0].advice == ""
    assert "twice in a row" in found[1].advice
    enforced = run([failure(step=step) for _ in range(3)], may_stop=True)
    assert [one.action for one in enforced] == ["restart", "stop"]
    assert enforced[-1].exit_code == 93


def test_a_script_that_cannot_start_is_tried_once_more_after_a_moment_and_then_stopped() -> None:
    """The second failure stops the job with 93 and says why (A4.1)."""
    found = run([failure(**CANNOT_START) for _ in range(9)], may_stop_start=True)
    assert [(one.action, one.delay_s) for one in found] == [("restart", 5), ("stop", 0)]
    assert found[0].backoff == "1 round failed within 60 s without known progress"
    assert (found[1].exit_code, found[1].rule) == (93, "stop.script_cannot_start")
    assert "every rank failed in this way, twice in a row" in found[1].reason


@pytest.mark.parametrize(
    "otherwise",
    [
        {"is_on_all_ranks": False},  # a file system that one node cannot read
        {"is_of_code": False},  # an OSError, or bad data
        {"has_ever_stepped": True},  # the script could start before
        {"lived_s": 61.0},  # it was past its imports, though no step was seen
        {"fingerprint": ""},
    ],
)
def test_what_another_start_may_survive_is_tried_again(otherwise: dict[str, object]) -> None:
    broken = failure(**(CANNOT_START | otherwise))
    found = run([broken] * 9, may_stop_start=True)
    assert {one.action for one in found} == {"restart"}


def test_two_different_failures_at_the_start_are_no_repetition() -> None:
    broken = [failure(**CANNOT_START, fingerprint=f"{n}") for n in range(5)]
    assert {one.action for one in run(broken, may_stop_start=True)} == {"restart"}


def test_a_script_that_cannot_start_is_only_said_where_stops_are_observed() -> None:
    found = run([failure(**CANNOT_START) for _ in range(3)])
    assert {one.action for one in found} == {"restart"}
    assert "cannot start" in found[1].advice


@pytest.mark.parametrize(
    "repeated",
    [
        {"fingerprint": "secondary:x"},
        {"fingerprint": ""},
        {"exit_code": None},
        {"cause": "node_lost"},
    ],
)
def test_what_may_be_an_accident_never_stops_the_job(repeated: dict[str, object]) -> None:
    found = run([failure(**repeated) for _ in range(5)], may_stop=True)
    assert {one.action for one in found} == {"restart"}


def test_failures_with_progress_between_are_never_deterministic() -> None:
    """The same failure at later steps never stops the job (A4.2)."""
    found = run([failure(step=10 * n) for n in range(1, 6)], may_stop=True, no_progress_limit=2)
    assert {one.action for one in found} == {"restart"}


def test_rounds_without_a_new_step_have_a_limit() -> None:
    failures = [failure(step=5, lived_s=500, fingerprint="") for _ in range(9)]
    found = run(failures, no_progress_limit=3, enforce=("no_progress",))
    assert len(found) == 4  # the first did make steps
    assert (found[-1].action, found[-1].exit_code) == ("stop", 93)


def test_a_stop_leaves_the_restarts_that_were_not_made() -> None:
    failures = [failure(step=5, lived_s=500, fingerprint="") for _ in range(9)]
    limits: dict[str, Any] = {"max_restarts": 9, "max_restarts_per_hour": 7, "no_progress_limit": 3}
    last = run(failures, enforce=("no_progress",), **limits)[-1]
    assert (last.action, [budget.left for budget in last.budgets]) == ("stop", [6, 4, 0])


@pytest.mark.parametrize(
    ("step", "says"), [(5, "made no new step"), (None, "ended without known progress")]
)
def test_rounds_whose_steps_nobody_knows_are_not_said_to_have_made_none(
    step: int | None, says: str
) -> None:
    found = run([failure(step=step, fingerprint="") for _ in range(9)], no_progress_limit=2)
    assert f"rounds in a row {says}; the limit is 2" in found[2].advice


def test_a_limit_of_rounds_without_a_step_that_nobody_asked_for_is_advice() -> None:
    failures = [failure(step=5, lived_s=500, fingerprint="") for _ in range(9)]
    found = run(failures, no_progress_limit=3)
    assert {one.action for one in found} == {"restart"}
    assert "the limit is 3" in found[3].advice


def test_a_long_round_that_nobody_counted_the_steps_of_says_nothing() -> None:
    found = run([failure(lived_s=500, fingerprint="") for _ in range(9)], no_progress_limit=3)
    assert {one.action for one in found} == {"restart"}


@pytest.mark.parametrize(
    ("fields", "counted"),
    [
        ({"steps_s": 5.0}, 3),
        ({"steps_s": 5.0, "exit_code": None}, 0),
        ({"cause": "node_lost", "steps_s": 5.0, "exit_code": None}, 0),
        ({"cause": "preempted", "exit_code": None}, 0),
        ({"cause": "preempted", "step": 0}, 0),
    ],
    ids=["it failed", "it was killed", "its node was lost", "it made room", "before a step"],
)
def test_a_short_round_of_uncounted_steps_is_one_without_progress_only_if_it_failed(
    fields: dict[str, Any], counted: int
) -> None:
    assert run([failure(**fields) for _ in range(3)])[-1].past.idle_rounds == counted


def test_the_brake_lets_only_hard_limits_stop_a_job() -> None:
    """Under the brake a stop is advice (A15.4)."""
    past = RestartHistory(idle_rounds=9)
    rules = RestartRules(spec(no_progress_limit=3), SETTINGS, is_braked=True)
    judged = judge(failure(step=0), past, rules)
    assert judged.action == "restart"
    assert "the limit is 3" in judged.advice


def test_nothing_is_left_below_zero_where_a_limit_only_advises() -> None:
    decisions = run([failure(fingerprint=f"f{number}") for number in range(7)], no_progress_limit=3)
    assert [decision.action for decision in decisions] == ["restart"] * 7
    assert {budget.left for decision in decisions[3:] for budget in decision.budgets[-1:]} == {0}
    assert "0 of 3 rounds without known progress left" in decisions[-1].reason


def move(**fields: object) -> RoundFailure:
    return failure(cause="numerics", asks="move", exit_code=16, **fields)


def test_ranks_that_ask_for_other_nodes_cost_no_restart_while_the_training_goes_on() -> None:
    found = run([move(step=10 * n) for n in range(1, 6)], max_restarts=1)
    assert [(one.action, one.rule, one.delay_s) for one in found] == [
        ("restart", "restart.elsewhere", 0)
    ] * 5
    assert found[-1].past.restarts == found[-1].past.idle_rounds == 0
    assert found[-1].reason == "it asks for other nodes, which does not count against the budget"


@pytest.mark.parametrize("step", [None, 7])
def test_a_script_that_only_asks_for_other_nodes_is_stopped_by_its_budget(step: int | None) -> None:
    """The second time without a new step it is a failure like any other."""
    found = run([move(step=step) for _ in range(9)], max_restarts=3)
    assert [one.past.restarts for one in found] == [0, 1, 2, 3, 4]
    assert [one.action for one in found] == ["restart"] * 4 + ["stop"]
    assert found[1].reason.startswith("it asks for other nodes again without a new step: 2 of 3")
    assert found[2].delay_s > 0


def test_a_failure_between_two_moves_is_no_new_step() -> None:
    found = run([move(step=7), failure(step=7), move(step=7), failure(step=8), move(step=8)])
    assert [one.past.restarts for one in found] == [0, 1, 2, 3, 3]


def test_without_numbered_steps_half_an_hour_of_them_counts_as_going_on() -> None:
    found = run([move(), move(steps_s=1799.0), move(steps_s=1800.0)])
    assert [one.past.restarts for one in found] == [0, 1, 1]


def test_a_rank_that_rejects_its_result_stops_the_job_without_a_requeue() -> None:
    (found,) = run([failure(cause="numerics", asks="stop", exit_code=17)] * 2, max_restarts=3)
    assert (found.action, found.rule, found.exit_code) == ("stop", "stop.asked", 93)
    assert [budget.left for budget in found.budgets] == [3]
