"""What is known of the lines of a file that is read, and of tracebacks that came before in it."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from everstep_services.attribution.log_analysis.attempts import FailureKind
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.parsed_line import ParsedLine
from everstep_services.attribution.log_analysis.tracebacks import MOST_FRAMES

_LONGEST = 400
_MOST_REMEMBERED = 20_000
"""The lines of all tracebacks that are remembered."""


class FileLine:
    """The meaning of a line in a file, and the kinds of failures that such lines have reported."""

    __slots__ = ("following", "kinds", "meaning", "origin")

    def __init__(self, meaning: ParsedLine, origin: Origin) -> None:
        self.meaning, self.origin = meaning, origin
        self.kinds: dict[object, FailureKind] = {}
        self.following: _Following = {}
        """Where a traceback begins with it: the lines after it, up to the exception."""


class TracebackLines(NamedTuple):
    """The lines of a traceback that came before."""

    last: FileLine
    size: int
    function: str
    """The innermost function of the script."""
    is_uncaught: bool
    frames: Sequence[int]
    """The indices of the innermost frames."""
    dates: Sequence[int]
    """The indices of lines with dates."""


_Following: TypeAlias = "dict[FileLine | None, _Following | TracebackLines]"


class TracebackMemory:
    """Finds tracebacks that came before by all of their lines."""

    def __init__(self) -> None:
        self._size = 0

    def clear(self) -> None:
        """Forget that the lines that are known remember anything."""
        self._size = 0

    def find(self, lines: Sequence[FileLine | None], at: int) -> TracebackLines | None:
        """The traceback that begins at an index, if it came before."""
        head = lines[at]
        following: _Following | TracebackLines | None = head.following if head else None
        while isinstance(following, dict):
            at += 1
            following = following.get(lines[at])
        return following

    def add(self, lines: Sequence[FileLine | None]) -> None:
        """Remember the lines of a traceback, if all are known and mean nothing else."""
        head, last = lines[0], lines[-1]
        if head is None or last is None or self._size > _MOST_REMEMBERED:
            return
        path = [it.meaning for it in lines if it is not None and it.origin == head.origin]
        if len(path) < len(lines) or any(it.means and not it.is_indented for it in path[1:-1]):
            return
        frames = [at for at, it in enumerate(path) if it.within.function is not None]
        user = [at for at in frames if path[at].within.is_user][-MOST_FRAMES:] or frames[-1:]
        functions = [path[at].within.function or "" for at in frames]
        outermost = next(filter(None, functions), "")
        following = head.following
        for line in lines[1:-1]:
            deeper = following.setdefault(line, {})
            assert isinstance(deeper, dict)
            following = deeper
        following[last] = TracebackLines(
            last,
            len(lines),
            path[user[-1]].within.function or "",
            outermost == "<module>",
            user,
            [at for at, it in enumerate(path) if it.is_dated],
        )
        self._size += len(lines)
