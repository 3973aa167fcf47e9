"""The `checkpoint_id` of torch's calls: the place of a job's checkpoints, and the step."""

import os
import re

from trainer_sdk.checkpoint import arguments
from trainer_sdk.checkpoint.storage import lasting

_STEP = re.compile(r"(?:.*[-_=.])?(?:step|iter|iteration)[-_=]?(\d{1,18})")


def split(checkpoint_id: "str | os.PathLike[str]") -> tuple[str, int | None]:
    """The root and the step of a checkpoint; without a step, the whole is a root."""
    place = arguments.path("checkpoint_id", checkpoint_id).rstrip("/")
    root, _, name = place.rpartition("/")
    match = _STEP.fullmatch(name)
    if match is None:
        return lasting(place), None
    return lasting(root or "."), int(match[1])


def root_and_step(checkpoint_id: "str | os.PathLike[str]") -> tuple[str, int]:
    """The root and the step of a checkpoint to save; `ValueError` without a step."""
    root, step = split(checkpoint_id)
    if step is None:
        raise ValueError(
            f"checkpoint_id must end in a step, as {root}/step-100, and is {checkpoint_id}: a "
            "checkpoint is found, and compared with others, by its step"
        )
    return root, step
