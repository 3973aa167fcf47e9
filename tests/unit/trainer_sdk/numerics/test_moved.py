"""What ranks compute on other nodes, next to what they had computed before."""

import math
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import pytest

from trainer_sdk.numerics.judgement import RankResults, ResultComparison, StepResult
from trainer_sdk.numerics.moved import MovedJudgement, judged_after_move, kept_step
from trainer_sdk.numerics.skips import KeptStep
from trainer_sdk.numerics.statistics import UnexpectedResult

NAN = UnexpectedResult("nan", math.nan, None, None, 7)
SPIKE = UnexpectedResult("loss_spike", 9.0, 1.5, 2.5, 7)
GOOD, BAD = StepResult(2.0, 1.0, (1, 2)), StepResult(math.nan, 1.0, (8, 9))
HIGH, HIGHER = StepResult(9.0, 1.0, (1, 2)), StepResult(8.0, 1.0, (1, 2))


def made(nodes: str, *results: StepResult) -> list[RankResults]:
    return [
        RankResults(
            rank=rank, node=node, device="", first=result, again=(result, result), elsewhere=None,
            elsewhere_by=None, inputs=f"of {rank}",
        )
        for rank, (node, result) in enumerate(zip(nodes, results, strict=True))
    ]  # fmt: skip


def judged(
    before: Sequence[RankResults],
    after: Sequence[RankResults],
    unexpected: UnexpectedResult = NAN,
) -> MovedJudgement | str:
    kept = kept_step(unexpected, before, 1)
    assert kept is not None
    kept = msgspec.json.decode(msgspec.json.encode(kept), type=KeptStep)
    return judged_after_move(kept, after, ResultComparison(after, ("a", "b"), 0.0, 2.0))


@pytest.mark.parametrize(
    ("nodes", "now", "unexpected"),
    [
        ("ac", (GOOD, GOOD), NAN),  # to a spare
        ("ba", (GOOD, GOOD), NAN),  # the nodes have changed their slots, and b is well again
        ("ba", (BAD, GOOD), NAN),  # or it is not
    ],
)
def test_the_device_of_before_is_named_if_another_one_computes_something_else(
    nodes: str, now: tuple[StepResult, StepResult], unexpected: UnexpectedResult
) -> None:
    known = judged(made("ab", GOOD, BAD), made(nodes, *now), unexpected)
    assert isinstance(known, MovedJudgement)
    judgement = known.judgement
    assert (judgement.kind, judgement.ranks, known.places[1].node) == ("persistent", (1,), "b")
    assert judgement.group == "a"
    assert not known.is_present
    assert f"rank 1 had loss nan on b, and has 2 on {nodes[1]}" in judgement.reason
    shown = known.results[1]
    assert shown.elsewhere == GOOD
    assert repr((shown.first, shown.elsewhere_by)) == repr((BAD, 1))


def test_a_result_that_is_the_same_on_other_nodes_is_correct() -> None:
    known = judged(made("ab", GOOD, BAD), made("cd", GOOD, BAD))
    assert isinstance(known, MovedJudgement)
    judgement = known.judgement
    assert (judgement.kind, judgement.ranks) == ("correct_but_unexpected", (1,))
    assert not judgement.is_open
    assert judgement.reason == "rank 1 had loss nan on b, and has the same on d"


def test_without_another_node_nothing_is_said_of_another_device() -> None:
    known = judged(made("a", HIGH), made("a", HIGH), SPIKE)
    assert isinstance(known, MovedJudgement)
    assert known.judgement.reason.endswith("had loss 9 on a, and has the same there once more")
    known = judged(made("a", HIGH), made("a", GOOD), SPIKE)
    assert isinstance(known, MovedJudgement)
    assert (known.judgement.kind, known.judgement.ranks) == ("transient", (0,))


def test_a_node_of_the_new_round_that_computes_wrongly_is_named_by_its_present_rank() -> None:
    known = judged(made("ab", HIGH, GOOD), made("cd", HIGH, BAD), SPIKE)
    assert isinstance(known, MovedJudgement)
    assert (known.judgement.kind, known.judgement.ranks, known.is_present) == (
        "persistent", (1,), True,
    )  # fmt: skip


def test_where_neither_result_is_plausible_the_first_device_is_in_doubt() -> None:
    known = judged(made("ab", HIGH, GOOD), made("cd", HIGHER, GOOD), SPIKE)
    assert isinstance(known, MovedJudgement)
    assert (known.judgement.kind, known.judgement.ranks) == ("persistent", (0,))


def test_another_step_is_not_compared() -> None:
    before = made("ab", GOOD, BAD)
    other = [replace(result, inputs="others") for result in before]
    assert "others than before" in str(judged(before, other))
    assert "1 ranks make it, and 2 made it before" in str(judged(before, made("a", GOOD)))
    assert kept_step(NAN, [replace(result, inputs="") for result in before], 1) is None
    assert kept_step(None, before, 1) is None
