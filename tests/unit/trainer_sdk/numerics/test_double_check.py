"""A device that computes wrongly is far from its own results in double precision."""

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from trainer_sdk.numerics.double_check import DoubleCheck, odd_one


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(50, 8), nn.Flatten(), nn.Linear(32, 16), nn.BatchNorm1d(16),
        nn.ReLU(inplace=True), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 1),
    )  # fmt: skip


def deviations(
    harm: Callable[[Tensor], Tensor] | None = None,
    victim: int = 2,
    *,
    of: str = "output",
    has_bfloat16: bool = False,
    scale: float = 1.0,
) -> list[float]:
    """Of a step in which a module's output, or the gradient of its weight, is harmed."""
    module = model()
    harmed: Any = module[victim]

    def after(it: nn.Module, _: object, output: Tensor) -> Any:
        return harm(output) if it is harmed and harm is not None and of == "output" else None

    if of == "weight" and harm is not None:
        harmed.weight.register_hook(harm)
    check = DoubleCheck([module, module])
    handle = register_module_forward_hook(after)
    torch.manual_seed(2)
    with check.recorded():
        for _ in range(2):
            ids = torch.randint(50, (8, 4))
            with torch.autocast("cpu", torch.bfloat16) if has_bfloat16 else nullcontext():
                loss = module(ids).float().square().mean() * scale
            loss.backward()
    handle.remove()
    assert not any(it._forward_hooks or it._forward_pre_hooks for it in module.modules())
    return check.deviations


@pytest.mark.parametrize("has_bfloat16", [False, True])
@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e6])
def test_of_two_healthy_devices_none_is_odd(scale: float, *, has_bfloat16: bool) -> None:
    """Rounding is not a fault, where sums cancel out as little as anywhere else."""
    values = deviations(scale=scale, has_bfloat16=has_bfloat16)
    assert max(values) < (0.02 if has_bfloat16 else 1e-6)
    assert odd_one({0: deviations(has_bfloat16=has_bfloat16), 1: values}) is None


@pytest.mark.parametrize(
    ("harm", "victim", "of"),
    [
        (lambda values: values * 1.001, 2, "output"),
        (lambda values: values * 1.001, 6, "output"),
        (lambda values: values * math.nan, 4, "output"),
        (lambda values: values * 1.5, 7, "weight"),
        (lambda values: values.index_fill(0, torch.tensor([3]), 0.1), 0, "weight"),
    ],
)
def test_a_device_whose_modules_give_something_else_is_odd(
    harm: Callable[[Tensor], Tensor], victim: int, of: str
) -> None:
    for is_first in (True, False):
        pair = {7: deviations(harm, victim, of=of), 3: deviations()}
        found = odd_one(pair if is_first else dict(reversed(pair.items())))
        assert found == 7


def test_a_check_changes_nothing() -> None:
    ids, results = torch.randint(50, (8, 4)), []
    for is_checked in (False, True):
        module = model()
        torch.manual_seed(2)
        with DoubleCheck([module]).recorded() if is_checked else nullcontext():
            module(ids).square().mean().backward()
        state = [*module.state_dict().values(), *(it.grad for it in module.parameters())]
        results.append([*map(Tensor.tolist, state), torch.rand(1).item()])
    assert results[0] == results[1]


def test_two_odd_devices_or_other_modules_tell_nothing() -> None:
    assert odd_one({0: [1.0, 0.0], 1: [0.0, 1.0]}) is None
    assert odd_one({0: [1.0], 1: [0.0, 0.0]}) is None
    assert odd_one({0: [], 1: []}) is None
