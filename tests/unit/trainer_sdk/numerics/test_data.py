"""The batches of a training: given again, passed over, and taken up after a roll-back."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from tests.checkpoint_helpers.exact_training import HAS_TORCHDATA
from trainer_sdk import sdk_log
from trainer_sdk.checkpoint.data import PerRank, PositionedSampler, RngState
from trainer_sdk.numerics.data import Batches

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
SIZE, BATCH = 20, 2
worlds = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), min_size=1, max_size=3)
spans = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=4)


class Drawing(Dataset[torch.Tensor]):
    """Each sample draws, as an augmentation does."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(()) / 2


@given(worlds, spans, st.integers(1, 25), st.integers(1, 4), st.booleans())
def test_any_number_of_ranks_uses_all_samples_but_the_skipped(
    rounds: list[tuple[int, int]],
    begins: list[tuple[int, int]],
    size: int,
    batch_size: int,
    shuffle: bool,
) -> None:
    skipped = [(at, at + length) for at, length in begins]
    used: list[int] = []
    state = None
    for world_size, steps in rounds:
        places = [(rank, world_size) for rank in range(world_size)]
        samplers = [
            PositionedSampler(size, batch_size=batch_size, shuffle=shuffle, place=place)
            for place in places
        ]
        for sampler in samplers:
            sampler.skip(skipped)
            if state is not None:
                sampler.load_state_dict(state)
            ahead = list(islice(sampler, steps + 2))
            for batch in islice(sampler.counted(ahead), steps):
                used += batch
        states = [sampler.state_dict() for sampler in samplers]
        assert all(each == states[0] for each in states)
        state = states[0]

    whole = PositionedSampler(size, batch_size=1, shuffle=shuffle, place=(0, 1))
    wanted = (
        sample
        for at, (sample,) in enumerate(whole)
        if not any(begin <= at < end for begin, end in skipped)
    )
    assert Counter(used) == Counter(islice(wanted, len(used)))


def positioned() -> tuple[Any, dict[str, Any]]:
    sampler = PositionedSampler(SIZE, batch_size=BATCH, shuffle=False, place=(0, 1))
    return DataLoader(Drawing(), batch_sampler=sampler), {"data": sampler, "random": RngState()}


def stateful() -> tuple[Any, dict[str, Any]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    loader = StatefulDataLoader(Drawing(), batch_size=BATCH)
    return loader, {"data": PerRank(loader), "random": RngState()}


KINDS = {"positioned": positioned, "stateful": stateful} if HAS_TORCHDATA else {"": positioned}


@pytest.fixture(params=KINDS)
def training(request: pytest.FixtureRequest) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(3)
    return KINDS[request.param]()


def unit_of(state: dict[str, Any]) -> int:
    return BATCH if isinstance(state["data"], PositionedSampler) else 1


def numbers(batches: Iterator[torch.Tensor], count: int) -> list[int]:
    """The first sample of each batch."""
    return [int(batch[0]) for batch in islice(batches, count)]


def test_the_batches_of_a_step_are_given_again(training: tuple[Any, dict[str, Any]]) -> None:
    loader, state = training
    batches, unit = Batches(loader, state), unit_of(state)
    given = iter(batches)
    first = next(given)
    batches.taken(1)
    second, third = next(given), next(given)
    assert batches.position == (unit, 3 * unit)
    for _ in range(2):
        batches.again()
        assert next(given) is second
        assert batches.position == (unit, 2 * unit)
        assert next(given) is third
    batches.taken(2)
    assert int(next(given)[0]) == 6
    assert int(first[0]) == 0


def test_a_state_saved_before_the_second_try_has_not_used_the_batch() -> None:
    loader, state = positioned()
    batches = Batches(loader, state)
    given = iter(batches)
    next(given)
    batches.taken(1)
    next(given)
    batches.again()
    assert state["data"].state_dict()["place"][0] == BATCH
    next(given)
    assert state["data"].state_dict()["place"][0] == 2 * BATCH


def test_the_span_of_steps_is_that_of_their_batches(training: tuple[Any, dict[str, Any]]) -> None:
    loader, state = training
    batches, unit = Batches(loader, state), unit_of(state)
    given = iter(batches)
    for step in (5, 6, 7):
        next(given)
        assert batches.span(step, step) == ((step - 5) * unit, (step - 4) * unit)
        batches.taken(step)
    next(given)
    assert batches.span(6, 8) == (unit, 4 * unit)
    assert batches.span(2, 8) == (0, 4 * unit)  # there is nothing before the first


def test_a_step_of_an_earlier_process_counts_as_long_as_the_present_one(
    training: tuple[Any, dict[str, Any]],
) -> None:
    loader, state = training
    unit = unit_of(state)
    batches = Batches(loader, state)
    numbers(iter(batches), 6)
    saved = state["data"].state_dict()
    loader, state = KINDS["positioned" if unit > 1 else "stateful"]()
    state["data"].load_state_dict(saved)
    later = Batches(loader, state)
    next(iter(later))
    assert later.span(3, 7) == (2 * unit, 7 * unit)


def test_skipped_batches_leave_no_trace_in_random_numbers(
    training: tuple[Any, dict[str, Any]],
) -> None:
    loader, state = training
    unit = unit_of(state)
    torch.manual_seed(7)
    batches = Batches(loader, state, [(0, unit), (2 * unit, 4 * unit)])
    given = list(islice(batches, 2))
    torch.manual_seed(7)
    wanted = [torch.stack([at + torch.rand(()) / 2 for at in pair]) for pair in ((2, 3), (8, 9))]
    assert all(map(torch.equal, given, wanted))


def test_after_a_restore_batches_go_on_there_without_what_is_skipped(
    training: tuple[Any, dict[str, Any]],
) -> None:
    loader, state = training
    batches, unit = Batches(loader, state), unit_of(state)
    given = iter(batches)
    for step in (1, 2):
        next(given)
        batches.taken(step)
    saved = state["data"].state_dict()
    assert numbers(given, 3) == [4, 6, 8]
    state["data"].load_state_dict(saved)
    batches.rewind(2, [(2 * unit, 4 * unit)])
    assert numbers(given, 2) == [8, 10]
    assert batches.span(2, 4) == (unit, 6 * unit)


@pytest.mark.skipif(not HAS_TORCHDATA, reason="torchdata is not installed")
def test_a_roll_back_to_an_earlier_epoch_ends_that_epoch_first() -> None:
    """The script stays in its epoch, and no sample of it is lost."""
    loader, state = stateful()
    batches = Batches(loader, state)
    seen = numbers(iter(batches), 6)
    saved = state["data"].state_dict()
    given = iter(batches)
    numbers(given, 4)
    for _ in range(2):
        given = iter(batches)
        numbers(given, 3)
    state["data"].load_state_dict(saved)
    batches.rewind(6, [(7, 9)])
    rest = numbers(given, 100)
    assert seen == [0, 2, 4, 6, 8, 10]
    # Of the first epoch one is left besides the skipped; two whole ones, and the script's own.
    assert rest == [12, 18, *range(0, 20, 2), *range(0, 20, 2), *range(0, 20, 2)]
    assert numbers(iter(batches), 1) == [0]


def test_batches_without_a_position_are_given_again_and_never_skipped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sdk_log, "_printed", set())
    Batches([1], {}, skips=False)
    assert capsys.readouterr().err == ""
    batches = Batches(iter([1, 2, 3]), {})
    assert not batches.can_skip
    assert "the batches have no position, so none can be passed over" in capsys.readouterr().err
    given = iter(batches)
    assert next(given) == 1
    batches.again()
    assert list(given) == [1, 2, 3]
    assert (batches.position, batches.span(1, 1)) == (None, None)
