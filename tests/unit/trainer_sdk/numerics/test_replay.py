"""Gradients of a re-run are compared with those of the first run, which may have been clipped."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer_sdk.numerics.replay import OwnGradients, StepCall, deviation, run_again
from trainer_sdk.numerics.snapshot import Snapshot, TrainingParts


def gradients(dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(200, generator=generator).to(dtype), None, torch.full((9,), 3.0).to(dtype)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_clipping_is_not_a_deviation(dtype: torch.dtype) -> None:
    whole = gradients(dtype)
    assert deviation(whole, gradients(dtype)) == 0
    for factor, limit in ((0.013, 9.0), (1.0, 1.0)):
        first = [None if one is None else (one * factor).clamp(-limit, limit) for one in whole]
        assert deviation(first, gradients(dtype)) == 0


def test_other_gradients_are_a_deviation() -> None:
    first = gradients()
    assert first[0] is not None
    first[0][7] += 0.1
    scaled = [None if one is None else one * 0.2 for one in first]
    for changed in (first, scaled):
        assert 1e-3 < deviation(changed, gradients()) < 1e-1
    opposite = [None if one is None else -one for one in gradients()]
    assert deviation(opposite, gradients()) > 1


def test_what_is_not_finite_deviates_from_what_is() -> None:
    first = gradients()
    assert first[0] is not None
    first[0][7] = math.nan
    assert deviation(first, gradients()) == math.inf
    assert math.isnan(deviation(gradients(), first))
    assert math.isnan(deviation(first, first))
    zeros = [None if one is None else one * 0 for one in gradients()]
    assert deviation(zeros, gradients()) == math.inf
    assert deviation(zeros, zeros) == 0


def test_a_hash_tells_which_group_of_gradients_differs() -> None:
    last = nn.Linear(4, 1)
    module = nn.Sequential(nn.Linear(3, 4), last)
    parts = TrainingParts({"model": module})
    batch = torch.ones(2, 3)
    factor = [1.0]

    def compute(values: Tensor) -> Tensor:
        loss: Tensor = module(values).sum() * 1.0
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = Snapshot(parts, list(parts.parameters()), again=True)
    call = StepCall(compute, batch, before.random)
    call.run()
    results = [run_again(parts, [call], before) for _ in range(2)]
    assert results[0] == results[1]
    weight: Any = last.weight
    weight.register_hook(lambda gradient: gradient * factor[0])
    factor[0] = 1.5
    other = run_again(parts, [call], before)
    differing = [
        name
        for name, one, another in zip(parts.groups, results[0].hashes, other.hashes, strict=True)
        if one != another
    ]
    assert differing == ["1.weight"]
    assert other.norm != results[0].norm


def test_gradients_are_unknown_if_a_parameter_was_not_there_at_first() -> None:
    """FSDP makes the tensors that get the gradients in the first step."""
    module = nn.Linear(2, 1)
    parts = TrainingParts({"model": module})
    own = OwnGradients(parts)
    with own.recorded():
        module(torch.ones(1, 2)).sum().backward()
    module.bias.requires_grad = False
    assert own.read() == ((), None)


def test_a_step_that_was_computed_under_autocast_is_computed_so_again() -> None:
    """The script has left the block when its step is looked at."""
    module = nn.Linear(64, 1)
    parts = TrainingParts({"model": module})
    batch = torch.rand(8, 64, generator=torch.Generator().manual_seed(1))

    def compute(values: Tensor) -> Tensor:
        loss: Tensor = module(values).float().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    before = Snapshot(parts, list(parts.parameters()), again=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        call = StepCall(compute, batch, before.random)
        first = float(call.run().detach())
    assert run_again(parts, [call], before).loss == first
    plain = StepCall(compute, batch, before.random)
    assert run_again(parts, [plain], before).loss != first
