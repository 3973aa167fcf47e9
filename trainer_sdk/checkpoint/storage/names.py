"""What is called how beside the checkpoints that can be seen: saves under way, what made room."""

import re
from dataclasses import dataclass

from trainer_sdk.checkpoint.manifest import step_of

SAVING = ".saving"
"""In a folder, what is not whole yet; in an object store that is below its step."""
REPLACED = ".replaced"
"""In a folder, what was quarantined and had to make room for another save of its step.

In an object store that stays where it was, below its step, and its manifest goes there, too.
"""
_SAVING = re.compile(r"(\d+)-r(\d+)-([0-9a-z]+)-(\d+)")
_PULLING, _BEFORE = "pull-", "-before-"


@dataclass(frozen=True, slots=True)
class SavingName:
    """What the name of a save says, which it has until it can be seen."""

    step: int
    round: int
    mark: str
    """Of the trainer, made anew with each of its starts."""
    count: int
    """Of the saves of that trainer."""


def saving_name(step: int, round_: int, mark: str, count: int) -> str:
    """The name of a save until it can be seen: two saves never have the same."""
    return f"{step}-r{round_}-{mark}-{count}"


def saving_of(name: str) -> SavingName | None:
    """What such a name says."""
    found = _SAVING.fullmatch(name)
    if found is None:
        return None
    step, round_, mark, count = found.groups()
    return SavingName(int(step), int(round_), mark, int(count))


def pulling_name(step: str) -> str:
    """The name of a copy until it is whole."""
    return f"{_PULLING}{step}"


def pulling_of(name: str) -> int | None:
    """The step of such a name."""
    return step_of(name.removeprefix(_PULLING)) if name.startswith(_PULLING) else None


def replaced_name(step: str, saving: str) -> str:
    """The name of what made room for a save."""
    return f"{step}{_BEFORE}{saving}"


def replaced_of(name: str) -> int | None:
    """The step of such a name."""
    step, _, saving = name.partition(_BEFORE)
    return step_of(step) if saving_of(saving) is not None else None
