"""The checkpoint from which all ranks resume: the first rank verifies it, the others follow."""

import os

import torch.distributed as dist

from trainer_sdk.checkpoint.rank_group import group_of_all
from trainer_sdk.integrations import seals
from trainer_sdk.rank_session import session

NUMERICS = "numerics.json"
"""As `trainer_sdk.numerics.skips` names it, which is imported only where there is one."""


def newest_for_all(
    folder: "str | os.PathLike[str]", prefix: str = "checkpoint-", suffix: str = ""
) -> str | None:
    """The newest verified checkpoint `PREFIX…SUFFIX` of a folder, the same on all ranks.

    With a process group all ranks call it together; without one, each rank verifies for itself.
    None if there is no checkpoint; `FileNotFoundError` if there are some, and none is good.
    """
    below = _suspect_from(os.fspath(folder))
    has_group = dist.is_available() and dist.is_initialized()
    with session().section("verify", "checkpoint"):
        if not has_group:
            return seals.newest_verified(folder, prefix, suffix, below=below)
        group = group_of_all()
        path, failure = "", ""
        if group.rank == 0:
            try:
                path = seals.newest_verified(folder, prefix, suffix, below=below) or ""
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the answer
                failure = str(error)
        path, failure = group.follow((path, failure), tuple[str, str])
    if failure:
        raise FileNotFoundError(failure)
    return path or None


def _suspect_from(folder: str) -> int | None:
    """The step from which on checkpoints are suspect, and not yet marked; None if none is.

    A roll-back that a kill has interrupted is finished once the training has begun.
    """
    if not os.path.exists(os.path.join(folder, NUMERICS)):
        return None
    from trainer_sdk.integrations.framework_numerics import suspect_from

    return suspect_from(folder)


def meet() -> None:
    """Wait until all ranks are here, if there is a process group."""
    if dist.is_available() and dist.is_initialized():
        group_of_all().highest([0])
