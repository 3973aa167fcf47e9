"""The batch of a step is divided among any number of ranks, without a sample more or less."""

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk import testing
from trainer_sdk.checkpoint import data
from trainer_sdk.checkpoint.data import PositionedSampler
from trainer_sdk.rank_session import session
from trainer_sdk.survive.share import BatchShare

batches = st.integers(1, 300)
worlds = st.integers(1, 40)
limits = st.one_of(st.none(), st.integers(1, 20))
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4)


def shares(global_batch: int, world_size: int, at_most: int | None) -> list[BatchShare]:
    return [
        BatchShare.of(global_batch, at_most=at_most, place=(rank, world_size))
        for rank in range(world_size)
    ]


@given(batches, worlds, limits, st.integers(0, 5))
def test_each_sample_of_a_step_counts_once(
    global_batch: int, world_size: int, at_most: int | None, step: int
) -> None:
    counted: list[int] = []
    for share in shares(global_batch, world_size, at_most):
        for micro, positions in zip(share, share.positions(step), strict=True):
            assert len(positions) == micro.size
            counted += positions if micro.weight else []
            assert set(positions) <= set(range(step * global_batch, (step + 1) * global_batch))
    assert counted == list(range(step * global_batch, (step + 1) * global_batch))


@given(batches, worlds, limits)
def test_all_ranks_make_the_same_number_of_micro_batches(
    global_batch: int, world_size: int, at_most: int | None
) -> None:
    divided = shares(global_batch, world_size, at_most)
    assert len({len(share) for share in divided}) == 1
    for share in divided:
        assert all(micro.size <= (at_most or global_batch) for micro in share)
        assert [micro.is_last for micro in share] == [False] * (len(share) - 1) + [True]
        own = [micro.size for micro in share if micro.weight]
        assert max(own, default=0) - min(own, default=0) <= 1
    counts = [sum(micro.size for micro in share if micro.weight) for share in divided]
    assert max(counts) - min(counts) <= 1


@given(batches, worlds, limits)
def test_the_mean_over_ranks_is_the_mean_over_samples(
    global_batch: int, world_size: int, at_most: int | None
) -> None:
    divided = shares(global_batch, world_size, at_most)
    weights = [micro.weight for share in divided for micro in share]
    assert sum(weights) == pytest.approx(world_size)
    per_sample = [micro.weight / micro.size for share in divided for micro in share if micro.weight]
    assert per_sample == pytest.approx([world_size / global_batch] * len(per_sample))


def test_summed_gradients_are_not_multiplied_by_the_number_of_ranks() -> None:
    weights = [
        micro.weight
        for rank in range(3)
        for micro in BatchShare.of(8, at_most=2, place=(rank, 3), is_averaged=False)
    ]
    assert sum(weights) == pytest.approx(1.0)


def test_an_equal_division_needs_no_more_than_a_mean() -> None:
    share = BatchShare.of(32, at_most=4, place=(1, 4))
    assert [micro.weight for micro in share] == [0.5, 0.5]
    assert share.positions(2) == [range(72, 76), range(76, 80)]


@given(
    st.lists(st.tuples(worlds, st.integers(1, 3)), min_size=1, max_size=3),
    spans,
    st.integers(1, 25),
    batches,
    limits,
    st.booleans(),
)
def test_a_sampler_continues_with_any_number_of_ranks(
    rounds: list[tuple[int, int]],
    begins: list[tuple[int, int]],
    size: int,
    global_batch: int,
    at_most: int | None,
    shuffle: bool,
) -> None:
    skipped = [(at, at + length) for at, length in begins]
    alone = PositionedSampler(size, batch_size=1, shuffle=shuffle, place=(0, 1))
    alone.skip(skipped)
    used: list[int] = []
    state = alone.state_dict()
    for world_size, steps in rounds:
        states = []
        by_step: list[list[int]] = [[] for _ in range(steps)]
        for share in shares(global_batch, world_size, at_most):
            sampler = PositionedSampler(size, batch_size=7, shuffle=shuffle, place=(3, 9))
            sampler.skip(skipped)
            sampler.load_state_dict(state)
            sampler.divide(share)
            batches = sampler.counted(islice(sampler, (steps + 1) * len(share)))
            for samples in by_step:
                for micro, batch in zip(share, batches, strict=False):
                    assert len(batch) == micro.size
                    samples.extend(batch if micro.weight else [])
            states.append(sampler.state_dict())
        assert all(each == states[0] for each in states)
        state = states[0]
        used += [sample for samples in by_step for sample in samples]
    assert used == [batch[0] for batch in islice(alone, len(used))]


def test_a_step_that_was_broken_off_is_given_anew() -> None:
    share = BatchShare.of(6, at_most=1, place=(0, 2))
    sampler = PositionedSampler(100, batch_size=1, shuffle=False, place=(0, 1))
    sampler.divide(share)
    batches = sampler.counted(sampler)
    assert [next(batches) for _ in range(4)] == [[0], [1], [2], [6]]
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    assert list(islice(sampler.counted(sampler), 3)) == [[6], [7], [8]]
    with pytest.raises(RuntimeError, match="make it after restore"):
        next(batches)


def test_a_sampler_has_the_place_of_the_present_group(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = PositionedSampler(100, batch_size=2, shuffle=False)
    fixed = PositionedSampler(100, batch_size=2, shuffle=False, place=(0, 1))
    assert next(iter(sampler)) == [0, 1]
    monkeypatch.setattr(data, "own_place", lambda _: (2, 3))
    batches = sampler.counted(sampler)
    assert [next(batches) for _ in range(2)] == [[4, 5], [10, 11]]
    assert sampler.consumed == 12
    assert next(iter(fixed)) == [0, 1]


def test_a_batch_is_shared_by_the_session() -> None:
    with testing.watched():
        run = session()
        assert run.share(8, at_most=3, place=(1, 2)) == BatchShare.of(8, at_most=3, place=(1, 2))
        assert [micro.size for micro in run.share(8)] == [8]
        with pytest.raises(ValueError, match="at_most must be at least 1, and is 0"):
            run.share(8, at_most=0)
        with pytest.raises(ValueError, match="place must be from 0 to 1, and is 2"):
            run.share(8, place=(2, 2))
