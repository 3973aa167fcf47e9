"""Frames, threads, and the stacks of a rank, with only the reported fields."""

from collections.abc import Mapping

import msgspec


class Frame(msgspec.Struct, frozen=True):
    """One call."""

    name: str
    file: str
    line: int = 0
    is_native: bool = False

    @property
    def function(self) -> str:
        """Its name without class and enclosing functions, which faulthandler does not tell."""
        return self.name if self.is_native else self.name.rpartition(".")[2]

    @property
    def place(self) -> str:
        """`main (train.py:61)`; a native frame has its library."""
        folders, _, name = self.file.rpartition("/")
        parent = folders.rpartition("/")[2]
        short = f"{parent}/{name}" if parent and not self.is_native else name
        return f"{self.name} ({short}:{self.line})" if self.line else f"{self.name} ({short})"


class Thread(msgspec.Struct, frozen=True, kw_only=True):
    """One thread, its innermost frame first."""

    name: str
    frames: tuple[Frame, ...]
    is_main: bool = False
    is_idle: bool | None = None
    """Whether it was off the processor; None where the dump does not tell."""
    has_interpreter: bool = False
    """Whether it held the interpreter's lock."""
    child: int = 0
    """The process, where it is not the rank's own but one that the rank has started."""
    call: str = ""
    """The innermost call of torch.distributed whose arguments the dump has."""
    arguments: Mapping[str, int] = {}
    """The ranks among its arguments: `dst`, `src`, and their places in the group; `peer` and
    the variables of a script that waits for a transfer of gloo."""


class RankStacks(msgspec.Struct, frozen=True, kw_only=True):
    """The stacks of one rank's dump."""

    rank: int
    threads: tuple[Thread, ...]
    problems: tuple[str, ...] = ()
    """The parts that could not be read."""

    @property
    def main(self) -> Thread | None:
        return next((thread for thread in self.threads if thread.is_main), None)


class Unreadable(msgspec.Struct, frozen=True, kw_only=True):
    """A file without any stack in it."""

    name: str
    reason: str
    rank: int | None = None
    is_evidence: bool = True
    """Whether it counts against the rank; a damaged file, for one, does not."""
