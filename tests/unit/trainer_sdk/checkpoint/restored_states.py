"""A state of two ranks, where it is saved, and what they have after a restore."""

from typing import Any

import torch

from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk.checkpoint.restore.restore import Restored

State = dict[str, Any]


def state(value: float) -> State:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    with torch.no_grad():
        for one in model.parameters():
            one.fill_(value)
    return {
        "model": model,
        "scale": torch.full((2, 3), value, dtype=torch.bfloat16),
        "step": int(value),
        "nested": {"list": [1, 2, int(value)], "tensors": [torch.full((3,), value)], "none": None},
    }


def values(found: State) -> set[float]:
    """The numbers that identify a state."""
    return {
        *(one for tensor in found["model"].parameters() for one in tensor.flatten().tolist()),
        *found["scale"].flatten().tolist(),
        float(found["step"]),
        float(found["nested"]["list"][2]),
        *found["nested"]["tensors"][0].tolist(),
    }


def restore(
    place: Place, step: int | None = None, **how: Any
) -> tuple[list[Restored | None], list[State]]:
    states = {rank: state(-1) for rank in range(place.world_size)}
    found = place.restore(states, step, **how)
    return found, list(states.values())


def everywhere(place: Place, step: int, **changes: Any) -> None:
    for rank in range(place.world_size):
        place.keep(step, rank, state(step), **changes)


def check(place: Place, step: int, tiers: list[str], **how: Any) -> list[Restored]:
    """Check that all ranks restore this step from these tiers, completely."""
    restored, states = restore(place, **how)
    assert all(one is not None for one in restored)
    found = [one for one in restored if one is not None]
    assert [(one.step, one.tier) for one in found] == [(step, tier) for tier in tiers]
    assert [values(one) for one in states] == [{step}] * place.world_size
    return found
