"""Optimizers before their first step: they have no state yet, and need one to load into."""

from typing import Any

import torch
from torch.optim import Optimizer


def is_blank(one: object) -> bool:
    """It has made no step, and has no gradients that a step would use."""
    return (
        isinstance(one, Optimizer)
        and not one.state
        and not any(parameter.grad is not None for parameter in _parameters(one))
    )


def give_state(optimizer: Optimizer) -> None:
    """Let it make its state by a step of zero gradients and no rate, which changes nothing else.

    Hooks are passed by: nobody may take it for a step of the training.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups
    rates = [group.get("lr") for group in groups]
    for parameter in _parameters(optimizer):
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    try:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        step: Any = type(optimizer).step
        getattr(step, "__wrapped__", step)(optimizer)
    finally:
        for group, rate in zip(groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for parameter in _parameters(optimizer):
            parameter.grad = None


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [one for group in optimizer.param_groups for one in group["params"]]
