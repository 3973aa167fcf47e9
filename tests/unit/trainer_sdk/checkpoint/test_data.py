"""The data position: an interrupted training uses the samples of an uninterrupted one."""

import copy
import gc
import random
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint_helpers.exact_training import HAS_TORCHDATA, LAST, Case, Training, differing
from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk import sdk_log
from trainer_sdk.checkpoint.data import PerRank, PositionedSampler, RngState, has_position
from trainer_sdk.checkpoint.restore.errors import RestoreError


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Warnings are printed again in each test."""
    lines: set[str] = set()
    monkeypatch.setattr(sdk_log, "_printed", lines)
    return lines


def ranks(world_size: int, size: int, batch_size: int, **how: Any) -> list[PositionedSampler]:
    return [
        PositionedSampler(size, batch_size=batch_size, place=(rank, world_size), **how)
        for rank in range(world_size)
    ]


def take(samplers: list[PositionedSampler], steps: int) -> list[int]:
    """All samples that all ranks use in a number of steps."""
    used: list[int] = []
    for sampler in samplers:
        # A loader with workers takes more batches in advance than are used.
        ahead = list(islice(sampler, steps + 3))
        for batch in islice(sampler.counted(ahead), steps):
            used += batch
    return used


rounds = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4)


@given(rounds, st.integers(1, 40), st.integers(1, 4), st.integers(0, 9), st.booleans())
def test_interrupted_or_not_and_by_however_many_ranks_the_same_samples_are_used(
    rounds: list[tuple[int, int]], size: int, batch_size: int, seed: int, shuffle: bool
) -> None:
    """World sizes change between the rounds (A8.10)."""
    used: list[int] = []
    state = None
    for world_size, steps in rounds:
        samplers = ranks(world_size, size, batch_size, seed=seed, shuffle=shuffle)
        for sampler in samplers:
            if state is not None:
                sampler.load_state_dict(state)
        used += take(samplers, steps)
        states = [sampler.state_dict() for sampler in samplers]
        state = states[0]
        assert all(one == state for one in states)

    [undisturbed] = ranks(1, size, 1, seed=seed, shuffle=shuffle)
    assert Counter(used) == Counter(take([undisturbed], len(used)))


def test_each_epoch_has_every_sample_once_in_an_order_of_its_own() -> None:
    [sampler] = ranks(1, 50, 10, seed=4)
    first, second = take([sampler], 5), take([sampler], 5)
    assert sampler.epoch == 2
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second
    [again] = ranks(1, 50, 10, seed=4)
    assert take([again], 5) == first
    [other] = ranks(1, 50, 10, seed=5)
    assert take([other], 5) != first


def test_a_batch_that_spans_two_epochs_is_full() -> None:
    [sampler] = ranks(1, 5, 4, shuffle=False)
    assert list(islice(sampler, 3)) == [[0, 1, 2, 3], [4, 0, 1, 2], [3, 4, 0, 1]]


def test_data_that_has_changed_is_refused() -> None:
    [sampler] = ranks(1, 100, 4, seed=1)
    [other] = ranks(1, 99, 4, seed=1)
    with pytest.raises(
        ValueError, match=r"\(100, 1, True\) when it was saved, and is \(99, 1, True\)"
    ):
        other.load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_data_that_has_changed_is_refused_before_anything_is_loaded(
    tmp_path: Path, tier: str
) -> None:
    place = Place(tmp_path)
    state = {"weights": torch.ones(2), "data": PositionedSampler(100, batch_size=4)}
    if tier == "global":
        place.publish(3, state)
    else:
        place.keep(3, 0, state)
    weights, sampler = torch.zeros(2), PositionedSampler(99, batch_size=4)
    with pytest.raises(RestoreError, match=r"step 3: data: the data was .*\(99, 0, True\) now"):
        place.restore({0: {"weights": weights, "data": sampler}})
    assert not weights.any()
    assert sampler.consumed == 0


def test_batches_that_are_not_counted_cause_a_warning(said: set[str]) -> None:
    [sampler] = ranks(1, 100, 4)
    next(iter(sampler))
    sampler.state_dict()
    assert any("iterate over sampler.counted(loader)" in line for line in said)


def test_a_sampler_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="size must be at least 1, and is 0"):
        PositionedSampler(0, batch_size=4)


def test_workers_that_read_ahead_do_not_move_the_position(tmp_path: Path) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(40))
    sampler = PositionedSampler(40, batch_size=4, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=1)
    used = [batch[0].tolist() for batch in islice(sampler.counted(loader), 3)]
    assert used == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert sampler.consumed == 12


@pytest.fixture
def workers_end_soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Or a later test waits for workers of torchdata that do not end: for 5 s for each of them."""
    with monkeypatch.context() as patched:
        patched.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
        yield
        gc.collect()


@pytest.mark.usefixtures("workers_end_soon")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("loader", ["positioned", "positioned_stateful", "stateful"])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
def test_an_interrupted_training_has_the_losses_of_an_undisturbed_one(
    loader: str, workers: int
) -> None:
    """Bit for bit, with dropout and samples made at random; all of it in test_exact_resume.py."""
    if "stateful" in loader and not HAS_TORCHDATA:
        pytest.skip("torchdata is not installed")
    case = Case(loader, workers, draws="all", persistent=workers > 0)
    saved: dict[int, Any] = {}
    undisturbed = Training(case)
    for step in undisturbed.steps(0):
        if step in {3, 6}:  # in the first epoch, and in or before the second
            parts = undisturbed.state.items()
            saved[step] = {name: copy.deepcopy(part.state_dict()) for name, part in parts}
    for step, states in saved.items():
        resumed = Training(case)
        for part in resumed.state.values():
            part.state_dict()  # a restore looks first where everything goes
        for name, part in resumed.state.items():
            part.load_state_dict(states[name])
            part.state_dict()  # the next save is prepared
        list(resumed.steps(step))
        assert list(resumed.losses) == list(range(step + 1, LAST + 1))
        assert differing(resumed.losses, undisturbed.losses) == []


@pytest.mark.parametrize("workers", [0, 1])
def test_an_iterator_from_before_the_restore_begins_at_the_position_or_is_refused(
    workers: int,
) -> None:
    dataset = torch.utils.data.TensorDataset(torch.arange(40))
    sampler = PositionedSampler(40, batch_size=4, shuffle=False)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
    early = iter(loader)
    sampler.load_state_dict({"place": (8, 40, 0, False)})
    torch.manual_seed(1)
    if workers:
        with pytest.raises(RuntimeError, match="before the position was restored, which is 8"):
            next(early)
    else:
        assert next(early)[0].tolist() == [8, 9, 10, 11]
    drawn = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)
    assert next(sampler.counted(loader))[0].tolist() == [8, 9, 10, 11]


def test_a_loader_of_a_sampler_with_a_position_is_refused_as_a_state() -> None:
    sampler = PositionedSampler(40, batch_size=4)
    loader: Any = torch.utils.data.DataLoader(range(40), batch_sampler=sampler)  # type: ignore[arg-type]
    loader.state_dict = loader.load_state_dict = lambda *_: {}
    with pytest.raises(TypeError, match="put the sampler into the state, not the loader"):
        PerRank(loader)


class Loader:
    """A loader as torchdata's StatefulDataLoader: its state is nested, and changes its form."""

    def __init__(self, at: int = 0) -> None:
        self.at = at

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "workers": [{"seen": i} for i in range(self.at)]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["workers"]) == state["at"]
        self.at = state["at"]


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_a_stateful_loader_continues_from_its_saved_position(tmp_path: Path, tier: str) -> None:
    """The position of a data loader is restored (A8.10)."""
    place = Place(tmp_path)
    loader = Loader(3)
    state = {"data": PerRank(loader), "weights": torch.ones(2)}
    if tier == "global":
        place.publish(3, state)
    else:
        place.keep(3, 0, state)
    again = Loader()
    place.restore({0: {"data": PerRank(again), "weights": torch.zeros(2)}})
    assert again.at == 3


def test_a_loader_of_another_world_size_is_refused_before_anything_is_loaded(
    tmp_path: Path,
) -> None:
    """The refusal leaves the state as it was (A8.10)."""
    saved = Place(tmp_path)
    saved.publish(3, {"data": PerRank(Loader(3)), "weights": torch.ones(2)}, world_size=4)
    other = PerRank(Loader())
    other._key = "rank-0-of-2"
    weights = torch.zeros(2)
    state = {"data": other, "weights": weights}
    with pytest.raises(
        RestoreError, match="data has a place for each rank, and was saved by another"
    ):
        saved.restore({0: state})
    assert not weights.any()


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), float(torch.rand(()))]


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_random_numbers_continue_where_they_were_saved(tmp_path: Path, tier: str) -> None:
    """Generators are restored from memory and from files (A8.10)."""
    place = Place(tmp_path)
    state = {"random": RngState(), "weights": torch.ones(2)}
    if tier == "global":
        place.publish(3, state)
    else:
        place.keep(3, 0, state)
    drawn = draw()
    assert draw() != drawn
    place.restore({0: {"random": RngState(), "weights": torch.zeros(2)}})
    assert draw() == drawn


def test_random_numbers_of_another_world_size_are_left_as_the_script_seeds_them(
    tmp_path: Path, said: set[str]
) -> None:
    """A line says that they were not restored (A8.10)."""
    place = Place(tmp_path)
    place.publish(3, {"random": RngState(), "weights": torch.ones(2)})
    other = RngState()
    other._key = "rank-0-of-2"
    weights = torch.zeros(2)
    state = {"random": other, "weights": weights}
    torch.manual_seed(1)
    drawn = torch.rand(3)
    torch.manual_seed(1)
    place.restore({0: state})
    assert torch.equal(torch.rand(3), drawn)
    assert weights.all()
    assert any("saved with another world size" in line for line in said)


def test_a_manifest_shows_whether_it_has_a_data_position() -> None:
    """A sampler and a loader have one, and generators have none (A8.10)."""
    assert has_position([torch.zeros(1), PositionedSampler(4, batch_size=1)])
    assert has_position([PerRank(Loader())])
    assert not has_position([torch.zeros(1), RngState()])
