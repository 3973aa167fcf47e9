"""What all ranks have sent of a step becomes results that can be compared."""

import math

import pytest
import torch

from trainer_sdk.numerics.agreement import RankPlace, SentResult, SentResults, bits
from trainer_sdk.numerics.elsewhere import StepPeers
from trainer_sdk.numerics.examination import joined_results
from trainer_sdk.numerics.judgement import StepResult, judge
from trainer_sdk.numerics.replay import deviation

GOOD, ODD = StepResult(2.0, 1.0, (1, 2)), StepResult(2.0, 3.0, (1, 7))
RANKS = 4


def judged(
    first: StepResult, apart: float, *, last: float | None = None
) -> tuple[str, tuple[int, ...]] | None:
    """Of a step whose rank 1 had this first result; `last` is the deviation of the last rank."""
    gathered = [
        SentResults(
            first=SentResult.of(first if rank == 1 else GOOD),
            again=(SentResult.of(GOOD),) * 2,
            deviation=bits(apart if last is None or rank < RANKS - 1 else last),
            elsewhere=None,
            elsewhere_of=0,
        )
        for rank in range(RANKS)
    ]
    places = [RankPlace(f"n{rank}", "", tuple(range(RANKS))) for rank in range(RANKS)]
    judgement = judge(None, joined_results(gathered, StepPeers(places, 0)), ("a", "b"), 0.0)
    return None if judgement is None else (judgement.kind, judgement.ranks)


def test_gradients_without_a_norm_are_not_compared_after_their_reduction() -> None:
    """To clip by an infinite norm makes zeros of the shards of all ranks, and NaN of one."""
    clipped, infinite = torch.zeros(2), torch.tensor([1.0, math.inf])
    assert deviation([clipped], [torch.ones(2)]) == math.inf
    assert math.isnan(deviation([clipped * math.nan], [infinite]))
    assert judged(GOOD, math.inf, last=math.nan) is None


@pytest.mark.parametrize("apart", [0.5, math.inf])
def test_a_sum_of_gradients_that_each_rank_had_right_is_transient_of_nobody(apart: float) -> None:
    assert judged(GOOD, apart) == ("transient", ())


def test_a_rank_whose_own_gradients_were_others_is_named() -> None:
    assert judged(ODD, 0.5) == ("transient", (1,))


def test_a_step_that_comes_again_is_healthy() -> None:
    assert judged(GOOD, 0.0) is None
