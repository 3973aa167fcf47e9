"""The values of a state are taken over into objects that are made anew; here without ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_sdk import sdk_log
from trainer_sdk.survive.carry import needs_rebuild, rebuild

State = dict[str, Any]


def optimizer_of(*modules: nn.Module) -> torch.optim.Optimizer:
    parameters = [parameter for module in modules for parameter in module.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def values(optimizer: torch.optim.Optimizer) -> list[Any]:
    states = [optimizer.state[each] for group in optimizer.param_groups for each in group["params"]]
    return [value.tolist() for state in states for value in state.values()]


class Container:
    """Optimizers of several modules, as frameworks have it."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers
        self.loaded: object = None

    def state_dict(self) -> dict[str, Any]:
        return {"count": len(self.optimizers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class Scaled(nn.Linear):
    """A layer with a state that is no tensor."""

    scale = 1.0

    def get_extra_state(self) -> float:
        return self.scale

    def set_extra_state(self, state: float) -> None:
        self.scale = state


def test_parts_at_any_depth_are_taken_over() -> None:
    def build() -> State:
        modules = nn.ModuleList([nn.Linear(2, 3), nn.BatchNorm1d(3)])
        return {
            "model": modules,
            "optimizers": Container([torch.optim.AdamW(module.parameters()) for module in modules]),
            "nested": {"steps": 0, "losses": [], "pair": (1, 2), "mean": torch.zeros(1)},
        }

    state = build()
    state["optimizers"] = Container([optimizer_of(module) for module in state["model"]])
    state["model"][1](torch.randn(4, 3))
    state["nested"] |= {"steps": 7, "losses": [1.5, torch.ones(1)], "pair": (3, 4)}
    state["nested"]["mean"] += 2
    state["best"] = 0.25
    kept = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    expected = [values(each) for each in state["optimizers"].optimizers]

    made, unfit = rebuild(build, state)
    assert (unfit, state) == ("", {})
    assert all(torch.equal(kept[name], own) for name, own in made["model"].state_dict().items())
    assert [values(each) for each in made["optimizers"].optimizers] == expected
    assert made["optimizers"].loaded == {"count": 2}
    assert made["nested"]["mean"].tolist() == [2.0]
    assert {**made["nested"], "mean": 0} == {
        "steps": 7,
        "losses": [1.5, torch.ones(1)],
        "pair": (3, 4),
        "mean": 0,
    }
    assert made["best"] == 0.25


def test_memory_is_moved_unless_others_use_that_of_the_new_tensor() -> None:
    views: list[Tensor] = []

    def build() -> State:
        module = nn.Linear(4, 4)
        views[:] = [module.bias.detach()]
        return {"model": module}

    state = build()
    before = {name: each.data_ptr() for name, each in state["model"].named_parameters()}
    bias = state["model"].bias.tolist()
    made, unfit = rebuild(build, state)
    assert unfit == ""
    assert made["model"].weight.data_ptr() == before["weight"]
    assert made["model"].bias.data_ptr() == views[0].data_ptr() != before["bias"]
    assert views[0].tolist() == bias


def test_lists_and_mappings_stay_those_that_other_objects_know() -> None:
    def build() -> State:
        options = {"rate": 1.0}
        module = nn.Linear(1, 1)
        module.options = options  # type: ignore[assignment]
        return {"model": module, "options": options}

    state = build()
    state["options"]["rate"] = 0.5
    made, _ = rebuild(build, state)
    assert made["model"].options is made["options"]
    assert made["options"] == {"rate": 0.5}


def test_parameters_and_states_without_a_module_are_taken_over() -> None:
    def build() -> State:
        layer = Scaled(2, 2)
        free = nn.Parameter(torch.zeros(3))
        groups: list[State] = [{"params": layer.parameters()}, {"params": [free]}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        return {"layer": layer, "optimizer": optimizer}

    state = build()
    state["layer"].scale = 4.0
    group = state["optimizer"].param_groups[1]
    group["lr"] = 0.7
    with torch.no_grad():
        group["params"][0] += 5
    made, unfit = rebuild(build, state)
    assert unfit == ""
    assert made["layer"].scale == 4.0
    assert made["optimizer"].param_groups[1]["lr"] == 0.7
    assert made["optimizer"].param_groups[1]["params"][0].tolist() == [5.0] * 3


def linear(width: int = 2, dtype: torch.dtype = torch.float32) -> Callable[[], State]:
    def build() -> State:
        layer = nn.Linear(2, width, dtype=dtype)
        return {"layer": layer, "optimizer": torch.optim.SGD(layer.parameters(), lr=0.1)}

    return build


def other_module() -> State:
    return {**linear()(), "layer": nn.Linear(2, 2, bias=False)}


def more_groups() -> State:
    layer = nn.Linear(2, 2)
    groups: list[State] = [{"params": [layer.weight]}, {"params": [layer.bias]}]
    return {"layer": layer, "optimizer": torch.optim.SGD(groups, lr=0.1)}


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (linear(3), "layer.weight was torch.float32 [2, 2], and build() makes it torch.float32 [3"),
        (linear(dtype=torch.float64), "layer.weight was torch.float32 [2, 2], and build() makes "),
        (other_module, "build() makes another layer: only the old or the new has bias"),
        (more_groups, "optimizer had groups of [2] parameters, and build() makes [1, 1]"),
        (lambda: {"layer": linear()()["layer"]}, "build() does not make optimizer again"),
        (lambda: {**linear()(), "layer": 1}, "build() makes another layer: only the old or the"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_changed(
    build: Callable[[], State], reason: str
) -> None:
    torch.manual_seed(1)
    state = linear()()
    torch.manual_seed(2)
    fresh = build()
    torch.manual_seed(2)
    made, unfit = rebuild(build, state)
    assert unfit.startswith(reason)
    if isinstance(fresh["layer"], nn.Module):
        parameters = zip(made["layer"].parameters(), fresh["layer"].parameters(), strict=True)
        assert all(torch.equal(own, other) for own, other in parameters)


def test_an_object_without_a_state_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk_log, "_printed", set())

    def build() -> State:
        return {"layer": nn.Linear(1, 1), "thing": object(), "function": len}

    rebuild(build, build())
    assert "thing has no state_dict" in capsys.readouterr().err


def test_a_state_that_has_no_state_dict_now_is_refused() -> None:
    class Broken(Container):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("the group is gone")

    def build() -> State:
        return {"broken": Broken([])}

    assert rebuild(build, build())[1] == "broken has no state_dict now: the group is gone"


def test_a_plain_state_holds_no_group() -> None:
    layer = nn.Linear(1, 1)
    assert not needs_rebuild({"layer": layer, "optimizer": optimizer_of(layer), "n": [1, {"a": 2}]})
