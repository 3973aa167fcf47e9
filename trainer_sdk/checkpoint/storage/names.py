"""The names of hidden folders: saves in progress, copies in progress, replaced checkpoints."""

import re
from dataclasses import dataclass

from trainer_sdk.checkpoint.manifest import step_of

SAVING = ".saving"
"""The folder of saves in progress; an object store has them below their step."""
REPLACED = ".replaced"
"""The folder of quarantined checkpoints that another save of their step has replaced.

In an object store their files stay below the step, and the old manifest is moved there.
"""
_SAVING = re.compile(r"(\d+)-r(\d+)-([0-9a-z]+)-(\d+)")
_PULLING, _BEFORE = "pull-", "-before-"


@dataclass(frozen=True, slots=True)
class SavingName:
    """The parts of the name that a save has until it is visible."""

    step: int
    round: int
    mark: str
    """A random mark of the training process."""
    count: int
    """The number of the save, of this process."""


def saving_name(step: int, round_: int, mark: str, count: int) -> str:
    """The name of a save until it is visible; unique to the save."""
    return f"{step}-r{round_}-{mark}-{count}"


def saving_of(name: str) -> SavingName | None:
    """The parts of such a name; None if it is another name."""
    match = _SAVING.fullmatch(name)
    if match is None:
        return None
    step, round_, mark, count = match.groups()
    return SavingName(int(step), int(round_), mark, int(count))


def pulling_name(step: str) -> str:
    """The name of a copy until it is complete."""
    return f"{_PULLING}{step}"


def pulling_of(name: str) -> int | None:
    """The step of such a name; None if it is another name."""
    return step_of(name.removeprefix(_PULLING)) if name.startswith(_PULLING) else None


def replaced_name(step: str, saving: str) -> str:
    """The name of a checkpoint that another save has replaced."""
    return f"{step}{_BEFORE}{saving}"


def replaced_of(name: str) -> int | None:
    """The step of such a name; None if it is another name."""
    step, _, saving = name.partition(_BEFORE)
    return step_of(step) if saving_of(saving) is not None else None
