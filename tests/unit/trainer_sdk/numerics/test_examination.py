"""What all ranks have sent of a step becomes results that can be compared."""

import math

import pytest

from trainer_sdk.numerics.agreement import RankPlace, SentResult, SentResults, bits
from trainer_sdk.numerics.elsewhere import StepPeers
from trainer_sdk.numerics.examination import joined_results
from trainer_sdk.numerics.judgement import StepResult, judge

GOOD, ODD = StepResult(2.0, 1.0, (1, 2)), StepResult(2.0, 3.0, (1, 7))
RANKS = 4


def judged(first: StepResult, deviation: float) -> tuple[str, tuple[int, ...]] | None:
    """Of a step whose rank 1 had this first result."""
    gathered = [
        SentResults(
            first=SentResult.of(first if rank == 1 else GOOD),
            again=(SentResult.of(GOOD),) * 2,
            deviation=bits(deviation),
            elsewhere=None,
            elsewhere_of=0,
        )
        for rank in range(RANKS)
    ]
    places = [RankPlace(f"n{rank}", "", tuple(range(RANKS))) for rank in range(RANKS)]
    judgement = judge(None, joined_results(gathered, StepPeers(places, 0)), ("a", "b"), 0.0)
    return None if judgement is None else (judgement.kind, judgement.ranks)


@pytest.mark.parametrize("deviation", [0.5, math.inf])
def test_a_sum_of_gradients_that_each_rank_had_right_is_transient_of_nobody(
    deviation: float,
) -> None:
    assert judged(GOOD, deviation) == ("transient", ())


def test_a_rank_whose_own_gradients_were_others_is_named() -> None:
    assert judged(ODD, 0.5) == ("transient", (1,))


def test_a_step_that_comes_again_is_healthy() -> None:
    assert judged(GOOD, 0.0) is None
