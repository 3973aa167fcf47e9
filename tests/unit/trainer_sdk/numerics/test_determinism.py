"""How often a result is the same when its step is run again."""

import math

from trainer_sdk.numerics.determinism import DeterminismCounts, ResultVariation
from trainer_sdk.numerics.judgement import RankResults, StepResult


def ran(first: StepResult, again: StepResult) -> list[RankResults]:
    return [RankResults(0, "n0", "cpu", first, (again, again), None, None)]


def test_numbers_and_hashes_that_differ_are_counted() -> None:
    counts = DeterminismCounts(["embed", "head"])
    same = StepResult(2.0, 4.0, (1, 2))
    counts.add(ran(same, same))
    counts.add(ran(same, StepResult(2.0, 5.0, (1, 3))))
    counts.add(ran(same, StepResult(2.5, math.nan, (1, 3))))
    assert counts.again == 3
    assert counts.variations == {
        "loss": ResultVariation(3, 1, 1 / 5),
        "grad_norm": ResultVariation(3, 2, 1 / 5),
        "embed": ResultVariation(3, 0, None),
        "head": ResultVariation(3, 2, None),
    }


def test_results_that_are_not_known_are_not_compared() -> None:
    counts = DeterminismCounts(["all"])
    counts.add(ran(StepResult(math.nan, None, ()), StepResult(math.nan, 1.0, (5,))))
    assert counts.variations == {"loss": ResultVariation(1, 0, 0.0)}
