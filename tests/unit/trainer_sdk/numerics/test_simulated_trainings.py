"""Healthy trainings are never blamed on a rank, and faults in them are found.

`pytest -m chaos` looks at a million steps of ranks; `make test` at a part of them.
"""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.unit.trainer_sdk.numerics.simulated_trainings import (
    GROUPS,
    HABITS,
    RANKS,
    Step,
    Trainings,
)
from trainer_sdk.numerics.judgement import (
    RankResults,
    ResultJudgement,
    StepResult,
    judge,
)
from trainer_sdk.numerics.policy import NumericsPolicy
from trainer_sdk.numerics.statistics import UnexpectedResult

POLICY = NumericsPolicy(
    transient="rollback",
    persistent="rollback",
    not_reproducible="rollback",
    replica="rollback",
)
VALIDATE_EVERY = 50


@pytest.mark.parametrize(
    ("steps", "seed"),
    [
        (60, 7),
        *(
            pytest.param(2000, seed, marks=[pytest.mark.chaos, pytest.mark.timeout(900)])
            for seed in (11, 12, 13, 14)
        ),
    ],
)
def test_a_healthy_training_is_not_blamed_on_a_rank(steps: int, seed: int) -> None:
    trainings = Trainings(list(HABITS.values()), seed)
    kinds: Counter[str] = Counter()
    for step in range(steps):
        trainings.draw()
        first = trainings.compute()
        suspected = looked(trainings, first)
        validated = {step % VALIDATE_EVERY} & set(range(len(HABITS)))
        runs = [first] + [trainings.compute() for _ in range(3 if suspected or validated else 0)]
        for job in suspected.keys() | validated:
            for world in (1, 2, RANKS):
                results = trainings.results(job, runs[:3], runs[3], world)
                unexpected = suspected.get(job)
                judgement = judge(
                    unexpected,
                    results,
                    GROUPS,
                    trainings.rounding(job),
                    max(watch.usual_loss for watch in trainings.watches[job]),
                )
                assert_harmless(judgement, unexpected)
                kinds[judgement.kind if judgement else ""] += 1
        trainings.learn(first)
    print(f"{steps * len(HABITS) * RANKS} steps of ranks: {dict(kinds)}")
    assert kinds[""] >= steps // VALIDATE_EVERY


def looked(trainings: Trainings, step: Step) -> dict[int, UnexpectedResult]:
    """Show the step to each watch; return what is unexpected in each job."""
    losses, norms = step.losses.tolist(), trainings.norms(step).tolist()
    outputs = step.outputs.tolist()
    suspected: dict[int, UnexpectedResult] = {}
    for job, habit in enumerate(trainings.habits):
        rate = habit.rate(trainings.step)
        for rank, watch in enumerate(trainings.watches[job]):
            shown = (trainings.step, losses[job][rank], norms[job], rate, outputs[job][rank])
            unexpected = watch.look(*shown)
            if unexpected is not None:
                suspected.setdefault(job, unexpected)
            watch.learn(*shown)
    return suspected


def assert_harmless(judgement: ResultJudgement | None, unexpected: UnexpectedResult | None) -> None:
    if judgement is None:
        assert unexpected is None
        return
    assert judgement.kind == "correct_but_unexpected", judgement
    act = POLICY.decide(judgement, moved_at=1, span=(0, 8), earlier=(), taken=0)
    assert act.action == "observe"


@pytest.fixture(scope="module")
def trained() -> Trainings:
    trainings = Trainings(list(HABITS.values()), 5)
    for _ in range(56):
        trainings.draw()
        step = trainings.compute()
        looked(trainings, step)
        trainings.learn(step)
    return trainings


@pytest.mark.parametrize("is_exact", [True, False])
def test_faults_of_a_rank_are_found_and_named(trained: Trainings, *, is_exact: bool) -> None:
    """Results that are off by 0.1 % where bits count, by half where sums are not the same."""
    dice = random.Random(9)
    size = 1e-3 if is_exact else 0.5
    jobs = [job for job, habit in enumerate(trained.habits) if habit.is_exact == is_exact]
    right: Counter[bool] = Counter()
    runs: list[Step] = []
    for trial in range(100):
        if trial % 25 == 0:
            trained.draw()
            runs = [trained.compute() for _ in range(4)]
        job, rank = dice.choice(jobs), dice.randrange(RANKS)
        results = trained.results(job, runs[:3], runs[3])
        kind = dice.choice(["transient", "persistent"])
        factor = dice.choice([1 + size, 1 - size, 1e4, math.nan])
        results = spoiled(results, rank, factor, is_persistent=kind == "persistent")
        usual_loss = max(watch.usual_loss for watch in trained.watches[job])
        judgement = judge(None, results, GROUPS, trained.rounding(job), usual_loss)
        right[judgement is not None and (judgement.kind, judgement.ranks) == (kind, (rank,))] += 1
    print(dict(right))
    assert right.total() == 100
    assert right[True] >= 0.99 * right.total()


def spoiled(
    results: list[RankResults], rank: int, factor: float, *, is_persistent: bool
) -> list[RankResults]:
    """The results if a rank scales what it computes: once, or each time and for its peer, too."""
    changed = list(results)
    own = changed[rank]
    changed[rank] = replace(own, first=scaled(own.first, factor))
    if is_persistent:
        again = tuple(scaled(result, factor) for result in own.again)
        changed[rank] = replace(changed[rank], again=again)
        peer = changed[rank - 1]
        assert peer.elsewhere is not None
        changed[rank - 1] = replace(peer, elsewhere=scaled(peer.elsewhere, factor))
    return changed


def scaled(result: StepResult, factor: float) -> StepResult:
    assert result.norm is not None
    hashes = (result.hashes[0], result.hashes[1] ^ 1)
    return StepResult(result.loss * factor, result.norm * factor, hashes)


def test_a_loss_with_a_flipped_bit_of_its_exponent_is_unexpected(trained: Trainings) -> None:
    seen: Counter[bool] = Counter()
    for watches in trained.watches:
        for watch in watches:
            band = watch.band("loss")
            assert band is not None
            for bits in (16, 32, 64, 128) if band.median else ():  # added to the exponent
                seen[watch.look(57, band.median * 2.0**bits) is not None] += 1
    assert seen[True] >= 0.99 * seen.total()
