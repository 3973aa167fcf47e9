"""Ranks with keys of their own, other worlds, loads in part; torch's own loader is the oracle."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader

from tests.checkpoint_helpers.saved_by import path_of, same, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import Place, together
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.restore import Restore, Restored

pytestmark = pytest.mark.timeout(120)
State = dict[str, Any]


def stage(number: int, value: float, **more: Any) -> State:
    """What one stage of a pipeline has: layers of its own, and an optimizer for them."""
    layers = torch.nn.ModuleDict({f"layer{number}": torch.nn.Linear(3, 2 + number)})
    with torch.no_grad():
        for one in layers.parameters():
            one.fill_(value + number)
    return {"model": layers, f"epoch of {number}": number + int(value), "lr": 0.5, **more}


def save(folder: Path, states: list[State], step: int = 4) -> None:
    def one(group: RankGroup) -> None:
        with saving(folder, group) as rank:
            assert rank.save(step, states[group.rank]) is not None
            assert rank.finish() == [1]

    together(len(states), one)


def restore(
    folder: Path, states: list[State], **how: Any
) -> tuple[list[Restored | None], list[str]]:
    place = Place(folder, len(states))
    return place.restore(dict(enumerate(states)), **how), place.told.warned


def by_torch(folder: Path, state: State, step: int = 4) -> State:
    flat = {
        name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is alone, torch says each time
        state_dict_loader.load(flat, checkpoint_id=path_of(folder, step), no_dist=True)
    return flat


def plain(state: State) -> State:
    return {
        name: one.state_dict() if hasattr(one, "state_dict") else one for name, one in state.items()
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_keys_of_their_own_restore_what_torch_loads(tmp_path: Path, ranks: int) -> None:
    """As the stages of a pipeline have them."""
    saved = [stage(number, 10) for number in range(ranks)]
    save(tmp_path, saved)
    live = [stage(number, -1) for number in range(ranks)]
    found, warned = restore(tmp_path, live)
    assert [one.step for one in found if one is not None] == [4] * ranks
    assert warned == []
    for rank in range(ranks):
        assert same(plain(live[rank]), plain(saved[rank]))
        assert same(plain(live[rank]), by_torch(tmp_path, stage(rank, -2)))


def merged(numbers: list[int], value: float) -> State:
    """Several stages on one rank."""
    stages = [stage(number, value) for number in numbers]
    layers = torch.nn.ModuleDict(
        {key: one for each in stages for key, one in each["model"].items()}
    )
    return {key: one for each in stages for key, one in each.items()} | {"model": layers}


def test_stages_may_be_dealt_to_other_ranks(tmp_path: Path) -> None:
    save(tmp_path, [stage(number, 10) for number in range(4)])
    live = [merged([0, 3], -1), merged([1, 2], -1)]
    restore(tmp_path, live)
    for state, numbers in zip(live, ([0, 3], [1, 2]), strict=True):
        assert same(plain(state), plain(merged(numbers, 10)))
        assert same(plain(state), by_torch(tmp_path, merged(numbers, -2)))
    alone = merged([0, 1, 2, 3], -1)
    restore(tmp_path, [alone])
    assert same(plain(alone), plain(merged([0, 1, 2, 3], 10)))


def test_what_no_rank_has_a_place_for_is_refused_by_name(tmp_path: Path) -> None:
    save(tmp_path, [stage(number, 10) for number in range(3)])
    live = [stage(number, -1) for number in range(2)]
    with pytest.raises(RestoreError, match=r"lacks, model\.layer2\.bias, model\.layer2\.weight"):
        restore(tmp_path, live)
    assert same(plain(live[0]), plain(stage(0, -1))), "nothing was touched"
    live = [stage(0, -1), merged([1, 2, 7], -1)]
    with pytest.raises(RestoreError, match=r"it lacks epoch of 7, model\.layer7\.bias"):
        restore(tmp_path, live)


def test_a_load_in_part_is_reported_by_name_and_number_in_one_line(tmp_path: Path) -> None:
    save(tmp_path, [stage(number, 10, head=torch.ones(4)) for number in range(3)])
    live = [stage(0, -1, head=torch.zeros(9)), stage(7, -1, adapter=torch.zeros(2))]
    before = plain(stage(7, -1, adapter=torch.zeros(2)))
    found, warned = restore(tmp_path, live, strict=False)
    assert same(plain(live[0])["model"], plain(stage(0, 10))["model"])
    assert live[0]["head"].tolist() == [0] * 9, "another shape"
    assert same(plain(live[1]), before | {"lr": 0.5})
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].kept == ("head",)
    assert found[1].kept == (
        "adapter", "epoch of 7", "model.layer7.bias", "model.layer7.weight",
    )  # fmt: skip
    assert found[1].ignored == found[0].ignored
    assert warned == [
        "step 4 is restored in part: 5 stay as the training has them (adapter, epoch of 7, head "
        "and 2 more); 6 have no place in the state to load into (epoch of 1, epoch of 2, "
        "model.layer1.bias and 3 more)"
    ]


def test_values_without_a_place_are_reported_also_in_a_whole_load(tmp_path: Path) -> None:
    save(tmp_path, [{"a": torch.ones(2), "history": {"1": 0.5, "2": 0.25}}])
    live: State = {"a": torch.zeros(2), "history": {}}
    _, warned = restore(tmp_path, [live])
    assert live["a"].tolist() == [1, 1]
    assert "2 have no place in the state to load into (history.1, history.2)" in warned[0]


def test_nothing_in_common_is_no_load(tmp_path: Path) -> None:
    save(tmp_path, [{"a": torch.ones(2)}])
    with pytest.raises(RestoreError, match="it has no value of the state to load into"):
        restore(tmp_path, [{"b": torch.zeros(2)}], strict=False)


def training(width: int) -> State:
    torch.manual_seed(width)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, width))
    optimizer = torch.optim.Adam(model.parameters())
    return {"model": model, "optimizer": optimizer}


def test_an_optimizer_of_other_parameters_is_kept_whole(tmp_path: Path) -> None:
    saved = training(2)
    saved["model"](torch.ones(1, 4)).sum().backward()
    saved["optimizer"].step()
    save(tmp_path, [saved])
    live = training(5)
    found, warned = restore(tmp_path, [live], strict=False)
    assert found[0] is not None
    assert torch.equal(live["model"][0].weight, saved["model"][0].weight)
    assert live["model"][1].weight.shape == (5, 3)
    assert not live["optimizer"].state, "it is as before its first step"
    assert "model.1.bias, model.1.weight, optimizer." in warned[0]


def test_ranks_that_ask_for_different_steps_hear_of_it_at_once(tmp_path: Path) -> None:
    place = Place(tmp_path, 2)

    def one(group: RankGroup) -> str:
        restoring = Restore(place.home(group.rank), group, place.told, 4 + group.rank)
        with pytest.raises(RestoreError) as raised:
            restoring.restore({"a": torch.ones(1)})
        return str(raised.value)

    assert all("rank 1 with step=5" in said for said in together(2, one))
