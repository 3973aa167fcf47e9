"""What a policy does about a judged step."""

from typing import Any

import pytest

from trainer_sdk.numerics.judgement import KINDS, Kind, ResultJudgement
from trainer_sdk.numerics.policy import (
    ACTIONS,
    NumericsAct,
    NumericsPolicy,
    Positions,
    default_policy,
)

FIELDS: dict[Kind, str] = {
    "transient": "transient",
    "persistent": "persistent",
    "correct_but_unexpected": "unexpected",
    "not_reproducible_and_not_local": "not_reproducible",
    "replica_differs": "replica",
}


def act(
    kind: Kind,
    policy: NumericsPolicy,
    *,
    ranks: tuple[int, ...] = (3,),
    span: Positions | None = (100, 108),
    earlier: tuple[Positions, ...] = (),
    taken: int = 0,
    is_open: bool = False,
) -> NumericsAct:
    judgement = ResultJudgement(kind, ranks, "", "the reason", is_open)
    return policy.decide(judgement, moved_at=12, span=span, earlier=earlier, taken=taken)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("action", ACTIONS)
def test_each_kind_has_its_own_action(kind: Kind, action: str) -> None:
    choices: dict[str, Any] = {FIELDS[kind]: action}
    if action == "again" and kind != "transient":
        with pytest.raises(ValueError, match=FIELDS[kind]):
            NumericsPolicy(**choices)
        return
    policy = NumericsPolicy(**choices)
    assert act(kind, policy).action == action
    for other in KINDS:
        if other != kind:
            assert act(other, policy).action == "observe"


@pytest.mark.parametrize("action", ["rollback", "skip"])
def test_a_way_back_ends_before_the_statistic_began_to_move(action: Any) -> None:
    done = act("persistent", NumericsPolicy(persistent=action))
    assert done == NumericsAct(action, 12, (100, 108), "the reason")


@pytest.mark.parametrize("action", ["rollback", "skip"])
@pytest.mark.parametrize("earlier", [(100, 108), (90, 100), (108, 120), (0, 500)])
def test_the_same_samples_are_gone_back_over_once(action: Any, earlier: Positions) -> None:
    policy = NumericsPolicy(unexpected=action)
    done = act("correct_but_unexpected", policy, earlier=((7, 9), earlier))
    assert done.action == "observe"
    assert done.reason.startswith(f"not done ({action}): samples {earlier[0]} to {earlier[1]}")
    assert act("correct_but_unexpected", policy, earlier=((7, 9),)).action == action


def test_data_have_no_part_in_replicas_that_differ() -> None:
    policy = NumericsPolicy(replica="rollback")
    assert act("replica_differs", policy, earlier=((100, 108),)).action == "rollback"


def test_batches_without_positions_cannot_be_skipped() -> None:
    done = act("transient", NumericsPolicy(transient="skip"), span=None)
    assert done.action == "observe"
    assert "no positions" in done.reason
    assert act("transient", NumericsPolicy(transient="rollback"), span=None).action == "rollback"


@pytest.mark.parametrize("ranks", [(), (0, 1)])
def test_no_node_leaves_without_being_named_alone(ranks: tuple[int, ...]) -> None:
    assert act("persistent", NumericsPolicy(persistent="exclude"), ranks=ranks).action == "observe"


def test_a_budget_bounds_what_is_done() -> None:
    policy = NumericsPolicy(unexpected="rollback", persistent="stop", transient="again", budget=2)
    assert act("correct_but_unexpected", policy, taken=1).action == "rollback"
    refused = act("correct_but_unexpected", policy, taken=2)
    assert refused.action == "observe"
    assert "budget of 2" in refused.reason
    assert act("persistent", policy, taken=2).action == "stop"
    assert act("transient", policy, taken=2).action == "again"


def test_a_job_without_a_peer_may_move() -> None:
    policy = NumericsPolicy(elsewhere="move", unexpected="rollback")
    assert act("correct_but_unexpected", policy, is_open=True).action == "move"
    assert act("correct_but_unexpected", policy).action == "rollback"
    spent = act("correct_but_unexpected", policy, is_open=True, taken=3)
    assert (spent.action, spent.refused) == ("observe", "move")


@pytest.mark.parametrize(
    "wrong", [{"persistent": "rerun"}, {"elsewhere": "here"}, {"budget": -1}, {"replica": ""}]
)
def test_unknown_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        NumericsPolicy(**wrong)


def test_only_one_mode_repeats_a_step_by_default() -> None:
    assert default_policy("validate_results") == {"transient": "again"}
    assert default_policy("observe") == {}
    with pytest.raises(ValueError, match="mode is one of"):
        default_policy("validate")  # type: ignore[arg-type]
