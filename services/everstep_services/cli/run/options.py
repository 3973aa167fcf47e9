"""What an option of `everstep run` is; the tables beside this file hold them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["flag", "text", "whole", "limit", "seconds"]
"""`limit` is a whole number or `none`; `seconds` may end in s, m or h."""
WORDS_FOR_NONE = frozenset({"", "none", "null"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One option. Its names may be written with dashes or underscores."""

    names: tuple[str, ...]
    """As typed, the long one last."""
    to: str
    """Under which name the plan asks for its value."""
    group: str
    """Its heading on the help page; empty for an option that is not shown there."""
    help: str
    kind: Kind = "text"
    metavar: str = ""
    least: float | None = None
    """The smallest number allowed."""
    choices: tuple[str, ...] = ()
    sets: bool = True
    """What a flag sets its value to."""
    environment: str = ""
    """A variable that stands for it, as torchrun's PET_*."""
    note: str = ""
    """It is accepted and does nothing: why. Said when it is given."""
    quiet: tuple[str, ...] = ()
    """Values that ask for nothing, so that there is nothing to note."""
    instead: str = ""
    """It is refused: what takes its place."""
    from_torchrun: bool = False

    @property
    def long(self) -> str:
        """Its long name, with dashes."""
        return self.names[-1]


def spellings(option: Option) -> Sequence[str]:
    """Every way to write its names."""
    return [*option.names, *(f"--{name[2:].replace('-', '_')}" for name in option.names
                             if name.startswith("--") and "-" in name[2:])]  # fmt: skip
