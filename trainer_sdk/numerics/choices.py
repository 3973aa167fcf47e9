"""Checks of what a script gives to `Session.numerics`: errors name the value and the remedy."""

from collections.abc import Iterable
from typing import Any, Final

import torch.distributed as dist

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.checkpointer import Checkpointer
from trainer_sdk.numerics.policy import Mode, NumericsPolicy

_OF_RE_RUNS: Final = ("transient", "persistent", "not_reproducible")
_BACK: Final = ("rollback", "skip")


def check_objects(batches: object, replicas: object, checkpointer: object) -> None:
    """Check the arguments that are objects of a class."""
    if batches is not None and not isinstance(batches, Iterable):
        raise TypeError(f"batches must be a loader, and is {arguments.shown(batches)}")
    if checkpointer is not None:
        arguments.instance("checkpointer", checkpointer, Checkpointer)
    if replicas is not None and not isinstance(replicas, getattr(dist, "ProcessGroup", ())):
        raise TypeError(
            "replicas must be the process group of the ranks with equal parameters, as "
            f"torch.distributed.group.WORLD, and is {arguments.shown(replicas)}"
        )


def check_ways_back(policy: NumericsPolicy, batches: object, checkpointer: Any, root: str) -> None:
    """Check that actions of the policy which need checkpoints and batches have them."""
    back = [f"{kind}={action!r}" for kind, action in policy.by_kind.items() if action in _BACK]
    if back and checkpointer is None and not root:
        raise ValueError(
            f"{back[0]} needs checkpoints to go back to: give checkpointer=, or their folder as "
            "root="
        )
    if back and batches is None:
        raise ValueError(f"{back[0]} needs the batches, to give them again: give the loader")
    if policy.elsewhere == "move" and checkpointer is None:
        raise ValueError('elsewhere="move" saves the state first: give checkpointer=')


def useless(policy: NumericsPolicy, mode: Mode) -> str:
    """Which actions are never taken in this mode, as a warning; empty if there are none."""
    never = [
        f"{kind}={action!r}"
        for kind, action in policy.by_kind.items()
        if kind in _OF_RE_RUNS and action != "observe"
    ]
    if not never or mode == "validate_results":
        return ""
    return f'{", ".join(never)} is without effect: only mode="validate_results" can find that out'
