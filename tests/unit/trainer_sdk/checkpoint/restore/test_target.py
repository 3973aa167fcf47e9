"""The live state to load into: it has torch's keys, and optimizers need no step before."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk.checkpoint.flat_state import flatten
from trainer_sdk.checkpoint.restore.errors import RestoreError
from trainer_sdk.checkpoint.restore.target import Target

names = st.text("abc", min_size=1, max_size=2)
leaves = st.one_of(
    st.integers(),
    st.text(max_size=2),
    st.none(),
    st.builds(torch.zeros, st.just(2)),
    st.tuples(st.integers(), st.integers()),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(names, st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=8,
)


@given(st.dictionaries(names, trees, max_size=3))
def test_keys_are_those_that_torch_gives(state: dict[str, Any]) -> None:
    try:
        flat, _ = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(ValueError, match="rename one"):
            Target(state)
        return
    values = Target(state).values
    assert values.keys() == flat.keys()
    assert all(values[key] is value for key, value in flat.items())


MAKERS: dict[str, Callable[[Any], Optimizer]] = {
    "adam": lambda p: Adam(p, lr=0.1, weight_decay=0.1),
    "adamw with a rate in a tensor": lambda p: AdamW(p, lr=torch.tensor(0.1)),
    "sgd": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "sgd with momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.used = torch.nn.Linear(4, 2)
        self.unused = torch.nn.Linear(2, 2)
        self.frozen = torch.nn.Linear(2, 2).requires_grad_(False)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.used(batch).pow(2).mean()
        return found


def train(model: Model, optimizer: Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((3, 4), step + 1.0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def put(place: Place, tier: str, state: dict[str, Any]) -> None:
    """A state of step 3, where ranks look for it."""
    if tier == "global":
        place.publish(3, state)
    else:
        place.keep(3, 0, state)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
@pytest.mark.parametrize("tier", ["memory", "global"])
def test_an_optimizer_without_a_step_has_its_state_after_a_restore(
    tmp_path: Path, make: Callable[[Any], Optimizer], tier: str
) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = make(model.parameters())
    train(model, optimizer, 3)
    saved = {"model": model, "optimizer": optimizer}
    put(place, tier, saved)
    train(model, optimizer, 2)

    other = Model()
    again = make(other.parameters())
    (found,) = place.restore({0: {"model": other, "optimizer": again}})
    assert found is not None
    assert found.tier == tier
    train(other, again, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
    assert len(again.state) == len(optimizer.state)


def train_by_closure(model: Model, optimizer: Optimizer, steps: int) -> None:
    """A closure, for optimizers that evaluate the loss several times in a step."""
    for step in range(steps):

        def loss(step: int = step) -> float:
            optimizer.zero_grad()
            found = model(torch.full((3, 4), step + 1.0))
            found.backward()
            return float(found.item())

        optimizer.step(loss)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("tier", ["memory", "global"])
def test_an_optimizer_whose_step_needs_an_argument_has_its_state_after_a_restore(
    tmp_path: Path, tier: str, steps: int
) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = LBFGS(model.used.parameters(), lr=0.1, max_iter=2)
    train_by_closure(model, optimizer, steps)
    saved = {"model": model, "optimizer": optimizer}
    put(place, tier, saved)
    train_by_closure(model, optimizer, 2)

    other = Model()
    again = LBFGS(other.used.parameters(), lr=0.1, max_iter=2)
    (found,) = place.restore({0: {"model": other, "optimizer": again}})
    assert found is not None
    assert found.tier == tier
    train_by_closure(other, again, 2)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_gradients_before_a_restore_stay_and_refuse_nothing(tmp_path: Path, tier: str) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 3)
    saved = {"model": model, "optimizer": optimizer}
    put(place, tier, saved)
    other = Model()
    again = Adam(other.parameters())
    other(torch.ones(1, 4)).backward()
    gradient = other.used.weight.grad
    assert gradient is not None
    before = gradient.clone()
    (found,) = place.restore({0: {"model": other, "optimizer": again}})
    assert found is not None
    assert other.used.weight.grad is gradient
    assert torch.equal(gradient, before)
    assert len(again.state) == len(optimizer.state)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_an_optimizer_gets_a_state_without_a_step_or_a_change(
    make: Callable[[Any], Optimizer],
) -> None:
    model = Model()
    optimizer = make(model.parameters())
    before = [one.detach().clone() for one in model.parameters()]
    groups = [dict(one) for one in optimizer.param_groups]
    counted: list[object] = []
    hooks = [
        register_optimizer_step_post_hook(lambda *_: counted.append(1)),
        optimizer.register_step_pre_hook(lambda *_: counted.append(2)),
    ]
    target = Target({"optimizer": optimizer})
    for hook in hooks:
        hook.remove()

    assert not counted
    assert all(map(torch.equal, before, model.parameters()))
    assert [dict(one) for one in optimizer.param_groups] == groups
    assert all(one.grad is None for one in model.parameters())
    target.undo()
    assert not optimizer.state


def test_an_optimizer_that_has_a_state_is_not_stepped(tmp_path: Path) -> None:
    model = Model()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 1)
    target = Target({"optimizer": optimizer})
    assert not any(key.startswith("optimizer.state.2.") for key in target.values)
    target.undo()
    assert optimizer.state


class Used(Model):
    """Each parameter has a gradient: torch's own functions make a state for all of them."""

    def __init__(self) -> None:
        super().__init__()
        del self.unused


class ByName:
    """How torch's guides wrap model and optimizer: states by the names of parameters."""

    def __init__(self, model: torch.nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return get_optimizer_state_dict(self.model, self.optimizer)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizer, state)


def test_states_by_the_names_of_parameters_are_restored(tmp_path: Path) -> None:
    place = Place(tmp_path)
    model = Used()
    optimizer = Adam(model.parameters())
    train(model, optimizer, 3)
    place.publish(3, {"model": model, "optimizer": ByName(model, optimizer)})
    train(model, optimizer, 2)

    other = Used()
    again = Adam(other.parameters())
    place.restore({0: {"model": other, "optimizer": ByName(other, again)}})
    train(other, again, 2)
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_an_optimizer_with_other_rates_gets_the_saved_rates(tmp_path: Path) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = SGD(model.parameters(), lr=0.5, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, 1)
    schedule.step()
    place.publish(1, {"optimizer": optimizer, "schedule": schedule})

    again = SGD(Model().parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.lr_scheduler.StepLR(again, 7)
    place.restore({0: {"optimizer": again, "schedule": other}})
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"] == 0.05
    assert other.state_dict() == schedule.state_dict()


def test_tensors_are_filled_in_place(tmp_path: Path) -> None:
    place = Place(tmp_path)
    saved = {
        "strided": torch.arange(12.0).view(3, 4).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 3),
        "bits": torch.tensor([True, False]),
        "half": torch.tensor([1.5, -2.25], dtype=torch.float16),
    }
    place.keep(1, 0, saved)
    live = {key: torch.zeros_like(one) for key, one in saved.items()}
    places = {key: one.data_ptr() for key, one in live.items()}
    place.restore({0: dict(live)})
    for key, one in saved.items():
        assert torch.equal(live[key], one)
        assert live[key].data_ptr() == places[key]


@pytest.mark.parametrize("wants_to_know", [False, True])
def test_a_module_whose_tensors_were_filled_loads_itself_only_if_it_has_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wants_to_know: bool
) -> None:
    place = Place(tmp_path)
    model = Used()
    place.publish(1, {"model": model})
    other = Used()
    torch.nn.init.zeros_(other.used.weight)
    asked: list[object] = []
    if wants_to_know:
        other.frozen.register_load_state_dict_post_hook(  # type: ignore[no-untyped-call]
            lambda *_: asked.append(1)
        )
    load = torch.nn.Module.load_state_dict

    def load_and_count(module: torch.nn.Module, *what: Any, **how: Any) -> Any:
        asked.append(module)
        return load(module, *what, **how)

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", load_and_count)
    place.restore({0: {"model": other}})
    assert bool(asked) is wants_to_know
    assert torch.equal(model.used.weight, other.used.weight)


class Transposed(torch.nn.Linear):
    """A module that saves other tensors than its own."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return {"weight": self.weight.detach().t().clone()}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        with torch.no_grad():
            self.weight.copy_(state_dict["weight"].t())


def test_a_module_that_saves_other_tensors_than_its_own_loads_them_itself(tmp_path: Path) -> None:
    place = Place(tmp_path)
    model, other = Transposed(3, 2), Transposed(3, 2)
    place.publish(1, {"model": model})
    place.restore({0: {"model": other}})
    assert torch.equal(model.weight, other.weight)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*deprecating ShardedTensor")
@pytest.mark.usefixtures("alone")
def test_a_sharded_tensor_is_never_loaded_from_an_image(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.keep(3, 0, {"table": torch.ones(8, 4)})
    live = sharded_tensor.full(ChunkShardingSpec(0, ["rank:0/cpu"]), (8, 4), 0.0)
    with pytest.raises(RestoreError, match="table is a ShardedTensor.*: use DTensor"):
        place.restore({0: {"table": live}})
    assert not live.local_shards()[0].tensor.any()


def test_two_values_of_one_name_are_refused(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish(1, {"a": {"b": 1}})
    with pytest.raises(RestoreError, match=r"two values of the state are called a\.b: rename one"):
        place.restore({0: {"a": {"b": 1}, "a.b": 2}})


class Doubled(Optimizer):
    """Its state is nested, and of another type than its parameters."""

    def __init__(self, parameters: Any, *, has_more: bool = False) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.has_more = has_more

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for one in self.param_groups[0]["params"]:
            if one.grad is not None:
                held = self.state[one].setdefault("means", {"none": None, "all": []})
                mean = held["all"][0] if held["all"] else torch.zeros_like(one, dtype=torch.float64)
                held["all"] = [mean * 0.9 + one.grad / 3]
                if self.has_more:
                    self.state[one]["more"] = torch.zeros(1)
                one.sub_(held["all"][0].to(one.dtype) * 0.1)


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_a_nested_state_is_restored_with_its_types(tmp_path: Path, tier: str) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = Doubled(model.parameters())
    train(model, optimizer, 3)
    put(place, tier, {"model": model, "optimizer": optimizer})
    train(model, optimizer, 2)

    other = Model()
    again = Doubled(other.parameters())
    place.restore({0: {"model": other, "optimizer": again}})
    train(other, again, 2)
    assert len(again.state) == len(optimizer.state)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        if one in optimizer.state:
            (right,), (found,) = (
                opt.state[p]["means"]["all"] for opt, p in ((optimizer, one), (again, two))
            )
            assert found.dtype == torch.float64
            assert torch.equal(right, found)


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_a_state_of_which_a_part_was_saved_is_refused_and_not_dropped(
    tmp_path: Path, tier: str
) -> None:
    place = Place(tmp_path)
    model = Model()
    optimizer = Doubled(model.parameters())
    train(model, optimizer, 1)
    put(place, tier, {"optimizer": optimizer})
    again = Doubled(Model().parameters(), has_more=True)
    with pytest.raises(RestoreError, match=r"optimizer\.state\.0\.more"):
        place.restore({0: {"optimizer": again}})


@pytest.mark.parametrize("tier", ["memory", "global"])
def test_a_model_without_memory_is_refused_with_the_remedy(tmp_path: Path, tier: str) -> None:
    place = Place(tmp_path)
    put(place, tier, {"model": Used()})
    with torch.device("meta"):
        empty = Used()
    with pytest.raises(RestoreError, match=r"model\.used\.weight is on the meta device.*to_empty"):
        place.restore({0: {"model": empty}})


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    made = torch.compile(model, backend="eager")
    assert isinstance(made, torch.nn.Module)
    return made


@pytest.mark.parametrize("tier", ["global", "memory"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("keys", ["of an older release", "plain"])
def test_a_state_of_a_compiled_model_is_that_of_the_model(
    tmp_path: Path, tier: str, is_compiled: bool, keys: str
) -> None:
    """Also of a part of a model; and a plain state is loaded into a compiled model."""

    def model(value: float, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
        inner = torch.nn.Sequential(torch.nn.Linear(2, 3), wrap(torch.nn.Linear(3, 1)))
        for one in inner.parameters():
            torch.nn.init.constant_(one, value)
        return wrap(inner)

    place, older = Place(tmp_path), keys == "of an older release"
    saved = {"model": model(7, compiled if older else lambda one: one)}
    spelled = [f"model.{key}" for key in saved["model"].state_dict()]
    assert any("_orig_mod" in key for key in spelled) is older
    if tier == "global":
        place.publish(4, saved)
    else:
        place.keep(4, 0, saved, keys=spelled)
    live = {"model": model(1, compiled if is_compiled else lambda one: one)}
    [restored] = place.restore({0: live})
    assert restored is not None
    assert (restored.tier, place.told.warned) == (tier, [])
    assert all(bool((one == 7).all()) for one in live["model"].parameters())


def test_a_compiled_model_is_saved_with_plain_keys() -> None:
    flat = flatten({"model": compiled(torch.nn.Linear(2, 1))})
    assert [*flat.values] == ["model.weight", "model.bias"]
    assert flat.paths["model.bias"] == ("model", "bias")


def test_a_refusal_names_the_parts_that_would_stay_as_made(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.publish(4, {"other": torch.nn.Linear(2, 1), "step": 4})
    live = {"model": torch.nn.Linear(2, 1), "step": 0}
    with pytest.raises(
        RestoreError, match=r"strict=False leaves model as made, and loads the rest"
    ):
        place.restore({0: live})
