"""Which computer an unexpected result came from, and what is judged of healthy ones."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.numerics.judgement import (
    RankResults,
    ResultJudgement,
    StepResult,
    judge,
    odd_one_out,
)
from trainer_sdk.numerics.statistics import UnexpectedResult

GROUPS = ("embed", "layers.0", "layers.1", "head")
SPIKE = UnexpectedResult("loss_spike", 9.0, 1.5, 2.5, 7)
NAN = UnexpectedResult("nan", math.nan, None, None, 7)
DIFFERS = None


def result(loss: float, norm: float | None = 1.0, head: int = 4) -> StepResult:
    return StepResult(loss, norm, (1, 2, 3, head))


GOOD = result(2.0)


def ranks(
    world: int,
    changed: Mapping[int, RankResults] | None = None,
    *,
    first: StepResult = GOOD,
    ring: bool = True,
) -> list[RankResults]:
    healthy = [
        RankResults(
            rank=rank,
            node=f"n{rank}",
            device="cuda:0",
            first=first,
            again=(first, first),
            elsewhere=first if ring else None,
            elsewhere_by=(rank + 1) % world if ring else None,
        )
        for rank in range(world)
    ]
    return [(changed or {}).get(each.rank, each) for each in healthy]


def changed(results: list[RankResults], rank: int, **fields: object) -> list[RankResults]:
    return [
        replace(each, **fields) if each.rank == rank else each  # type: ignore[arg-type]
        for each in results
    ]


def kind_of(judgement: ResultJudgement | None) -> tuple[str, tuple[int, ...]]:
    assert judgement is not None
    return judgement.kind, judgement.ranks


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("rounding", [0.0, 1e-2])
@pytest.mark.parametrize(
    ("unexpected", "bad"), [(SPIKE, 9.0), (SPIKE, 0.0), (NAN, math.nan), (NAN, math.inf)]
)
def test_a_result_that_a_rerun_does_not_give_is_transient(
    world: int, rounding: float, unexpected: UnexpectedResult, bad: float
) -> None:
    rank = world // 2
    results = changed(ranks(world, ring=False), rank, first=result(bad))
    judgement = judge(unexpected, results, GROUPS, rounding)
    assert kind_of(judgement) == ("transient", (rank,))
    assert judgement is not None
    assert f"rank {rank} on n{rank} (cuda:0)" in judgement.reason
    assert "again 2 and 2" in judgement.reason


def test_the_first_group_that_differs_is_named() -> None:
    bad = StepResult(2.0, 1.0, (1, 2, 99, 99))
    judgement = judge(DIFFERS, changed(ranks(4), 1, first=bad), GROUPS, 0.0)
    assert kind_of(judgement) == ("transient", (1,))
    assert judgement is not None
    assert judgement.group == "layers.1"


def test_a_single_bit_counts_where_algorithms_are_deterministic() -> None:
    results = changed(ranks(4), 2, first=result(math.nextafter(2.0, 3.0)))
    assert kind_of(judge(DIFFERS, results, GROUPS, 0.0)) == ("transient", (2,))
    assert judge(DIFFERS, results, GROUPS) is None
    assert kind_of(judge(SPIKE, results, GROUPS))[0] == "correct_but_unexpected"


def test_a_reduced_norm_that_differs_everywhere_names_no_rank() -> None:
    results = [replace(each, first=result(2.0, norm=50.0)) for each in ranks(4)]
    assert kind_of(judge(SPIKE, results, GROUPS)) == ("transient", ())
    results = changed(results, 3, first=result(8.0, norm=50.0))
    assert kind_of(judge(SPIKE, results, GROUPS)) == ("transient", (3,))


@pytest.mark.parametrize("rounding", [0.0, 1e-2])
@pytest.mark.parametrize("world", [3, 4, 8])
@pytest.mark.parametrize("unexpected", [SPIKE, DIFFERS])
def test_a_rank_that_always_computes_wrongly_is_persistent(
    rounding: float, world: int, unexpected: UnexpectedResult | None
) -> None:
    bad = result(9.0, head=7)
    results = changed(ranks(world), 1, first=bad, again=(bad, bad))
    results = changed(results, 0, elsewhere=bad)  # rank 1 computes it
    judgement = judge(unexpected, results, GROUPS, rounding)
    assert kind_of(judgement) == ("persistent", (1,))
    assert judgement is not None
    assert judgement.group == ("head" if rounding == 0 else "")
    assert "n1" in judgement.reason


@pytest.mark.parametrize(
    ("unexpected", "bad", "expected"),
    [
        (SPIKE, 9.0, (1,)),
        (NAN, math.nan, (1,)),
        (DIFFERS, 2.5, (0, 1)),
    ],
)
@pytest.mark.parametrize("at", ["own samples", "all samples"])
def test_of_two_ranks_the_one_with_implausible_values_is_persistent(
    unexpected: UnexpectedResult | None, bad: float, expected: tuple[int, ...], at: str
) -> None:
    wrong = result(bad)
    results = changed(ranks(2), 1, first=wrong, again=(wrong, wrong))
    if at == "all samples":
        results = changed(results, 0, elsewhere=wrong)
    judgement = judge(unexpected, results, GROUPS)
    assert kind_of(judgement) == ("persistent", expected)
    assert judgement is not None
    assert ("nothing tells which" in judgement.reason) == (len(expected) > 1)
    assert (" compute something" in judgement.reason) == (len(expected) > 1)


def test_a_device_that_is_wrong_only_about_a_peers_samples_is_named() -> None:
    """It repeats the batch of rank 2, and gets nonsense."""
    results = changed(ranks(4), 2, elsewhere=result(math.nan))
    assert kind_of(judge(SPIKE, results, GROUPS)) == ("persistent", (3,))


def test_stages_of_a_pipeline_are_judged_together() -> None:
    # Ranks 0, 1 are the stages of one replica, 2, 3 of the other, which spoils each of its sums.
    bad = result(9.0)
    results = [
        RankResults(0, "n0", "0", GOOD, (GOOD, GOOD), bad, 2, replica=0),
        RankResults(1, "n0", "1", GOOD, (GOOD, GOOD), bad, 3, replica=0),
        RankResults(2, "n1", "0", bad, (bad, bad), GOOD, 0, replica=1),
        RankResults(3, "n1", "1", bad, (bad, bad), GOOD, 1, replica=1),
    ]
    assert kind_of(judge(SPIKE, results, GROUPS)) == ("persistent", (2, 3))


def staged(*ways: str, result: StepResult = GOOD, hashes: tuple[int, ...] = ()) -> StepResult:
    """A result of a stage that got and gave other values than usual in these ways."""
    names = ("got", "gave", "got back", "gave back")
    passes = tuple(9 if name in ways else number for number, name in enumerate(names, 1))
    return replace(result, passes=passes, hashes=hashes or result.hashes)


FIRST_IN_FORWARD = {
    0: staged("gave", "got back", hashes=(9,) * 4),
    1: staged("got", "gave back", result=result(2.1), hashes=(9,) * 4),
}
FIRST_IN_BACKWARD = {0: staged("got back", hashes=(9,) * 4), 1: staged("gave back")}
FIRST_IN_LOSS = {0: staged("got back", hashes=(9,) * 4), 1: staged(result=result(2.1))}
FIRST_IN_GRADIENTS = {1: staged(hashes=(1, 9, 3, 4))}


@pytest.mark.parametrize(
    ("odd", "rank"),
    [
        (FIRST_IN_FORWARD, 0),
        (FIRST_IN_BACKWARD, 1),
        (FIRST_IN_LOSS, 1),
        (FIRST_IN_GRADIENTS, 1),
    ],
)
def test_the_stage_is_named_that_gave_something_else_for_the_same(
    odd: Mapping[int, StepResult], rank: int
) -> None:
    """A wrong gradient that a stage sends upstream leaves its own gradients right."""
    results = [replace(each, replica=each.rank // 2) for each in ranks(4, first=staged())]
    once = [replace(each, first=odd.get(each.rank, each.first)) for each in results]
    assert kind_of(judge(DIFFERS, once, GROUPS, 0.0)) == ("transient", (rank,))
    each_time = [
        replace(each, elsewhere=odd.get(each.rank, staged()), elsewhere_by=(each.rank + 2) % 4)
        for each in results
    ]
    expected = ("persistent", (rank, rank + 2))
    assert kind_of(judge(DIFFERS, each_time, GROUPS, 0.0)) == expected


@pytest.mark.parametrize(
    ("odd", "ranks_named"), [(("gave",), (1, 3)), (("got", "gave"), (0, 1, 2, 3))]
)
def test_where_devices_may_round_differently_a_stage_that_is_the_same_tells(
    odd: tuple[str, ...], ranks_named: tuple[int, ...]
) -> None:
    """Here stage 0 gives the same elsewhere, or each stage gives something else."""
    first = staged("gave") if len(odd) > 1 else staged()
    results = [
        replace(
            each, replica=each.rank // 2, elsewhere_by=(each.rank + 2) % 4,
            elsewhere=staged(*odd, result=result(2.5)) if each.rank % 2 else first,
        )
        for each in ranks(4, first=staged())
    ]  # fmt: skip
    assert kind_of(judge(DIFFERS, results, GROUPS, 1e-2)) == ("persistent", ranks_named)


def test_all_stages_of_the_replica_are_named_whose_loss_was_not_reproduced() -> None:
    # A fault of the first stage shows in the loss, which the last stage alone has.
    results = [replace(each, replica=each.rank // 2) for each in ranks(4)]
    results = changed(results, 3, first=result(2.1))
    assert kind_of(judge(DIFFERS, results, GROUPS, 0.0)) == ("transient", (2, 3))


@pytest.mark.parametrize("world", [1, 4])
def test_a_result_that_is_the_same_everywhere_is_correct(world: int) -> None:
    bad = result(9.0)
    results = changed(ranks(world), 0, first=bad, again=(bad, bad), elsewhere=bad)
    judgement = judge(SPIKE, results, GROUPS, 0.0)
    assert kind_of(judgement) == ("correct_but_unexpected", (0,))
    assert judgement is not None
    assert not judgement.is_open
    results = [replace(each, elsewhere=None) for each in results]
    judgement = judge(SPIKE, results, GROUPS, 0.0)
    assert judgement is not None
    assert judgement.is_open


def test_an_expected_result_that_is_the_same_everywhere_is_not_judged() -> None:
    assert judge(DIFFERS, ranks(4), GROUPS, 0.0) is None


def test_one_rank_whose_every_result_differs_is_named() -> None:
    results = changed(ranks(4), 2, again=(result(2.3), result(1.4)))
    for rounding in (0.0, 1e-2):
        assert kind_of(judge(SPIKE, results, GROUPS, rounding)) == ("transient", (2,))


def test_nobody_is_named_where_no_result_can_be_reproduced() -> None:
    results = [
        replace(each, again=(result(2.0 + each.rank / 10), result(3.0))) for each in ranks(4)
    ]
    for rounding in (0.0, 1e-2):
        judgement = judge(SPIKE, results, GROUPS, rounding)
        assert kind_of(judgement) == ("not_reproducible_and_not_local", ())


def test_nobody_is_named_where_no_peer_can_reproduce() -> None:
    results = [replace(each, elsewhere=result(3.0 + each.rank)) for each in ranks(4)]
    assert kind_of(judge(DIFFERS, results, GROUPS)) == ("not_reproducible_and_not_local", ())


NOISE = st.floats(-1e-3, 1e-3)


@given(st.lists(st.tuples(NOISE, NOISE, NOISE, NOISE), min_size=1, max_size=8))
def test_rounding_alone_is_never_a_fault(
    noise: list[tuple[float, float, float, float]],
) -> None:
    results = [
        RankResults(
            rank=rank,
            node="n",
            device="0",
            first=result(9 * (1 + first), head=1),
            again=(result(9 * (1 + second), head=2), result(9 * (1 + third), head=3)),
            elsewhere=result(9 * (1 + fourth), head=4),
            elsewhere_by=(rank + 1) % len(noise),
        )
        for rank, (first, second, third, fourth) in enumerate(noise)
    ]
    assert kind_of(judge(SPIKE, results, GROUPS))[0] == "correct_but_unexpected"


@given(
    world=st.integers(3, 16),
    data=st.data(),
)
def test_the_odd_one_out_is_named_with_its_first_group(world: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, world - 1))
    group = data.draw(st.integers(0, len(GROUPS) - 1))
    hashes = {rank: [1, 2, 3, 4] for rank in range(world)}
    assert odd_one_out(_tuples(hashes.items()), GROUPS) is None
    for later in range(group, len(GROUPS)):
        hashes[odd][later] ^= 1 << 63
    judgement = odd_one_out(_tuples(hashes.items()), GROUPS)
    assert kind_of(judgement) == ("replica_differs", (odd,))
    assert judgement is not None
    assert judgement.group == GROUPS[group]


def _tuples(hashes: Iterable[tuple[int, list[int]]]) -> dict[int, tuple[int, ...]]:
    return {rank: tuple(values) for rank, values in hashes}


@pytest.mark.parametrize("count", [1, 2])
def test_replicas_without_a_majority_are_all_named(count: int) -> None:
    hashes = dict.fromkeys(range(count), (1, 2, 3, 4))
    hashes |= dict.fromkeys(range(count, 2 * count), (1, 2, 9, 4))
    judgement = odd_one_out(hashes, GROUPS)
    assert kind_of(judgement) == ("replica_differs", tuple(range(2 * count)))
    assert judgement is not None
    assert judgement.group == "layers.1"
    assert "no majority" in judgement.reason
