"""Python's tracebacks, put together from lines that may lie far apart."""

import re
from collections.abc import Sequence

import msgspec

_HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'^\s*(?:\| )?File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<name>.+))?'
)
_BOXED = re.compile(
    r"^\s*│ (?P<file>/[^:]{1,400}):(?P<line>\d+) in (?P<name>\S+)"  # rich
)
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?::\s?(?P<text>.*))?$")
_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python\d|^<frozen |/torch/|/runpy\.py|^<string>"
)
_INDENTS = " |+"
"""Exception groups are drawn with the latter two."""
_MOST_FRAMES = 3
_MOST_STRAY_LINES = 40


class TracebackFrame(msgspec.Struct, frozen=True):
    """One place in the code."""

    file: str
    line: int
    function: str


class Raised(msgspec.Struct, frozen=True):
    """An exception with its innermost frames; those of user code, where there are any."""

    kind: str
    message: str
    frames: tuple[TracebackFrame, ...]


class Traceback:
    """A traceback of one origin that is not over."""

    def __init__(self, *, is_of_end: bool = True) -> None:
        self.is_of_end = is_of_end
        """Whether what it reports could end a script."""
        self._user: list[TracebackFrame] = []
        self._inner: TracebackFrame | None = None
        self._depth = 0
        """How far the last frame was indented."""
        self._stray = 0

    @staticmethod
    def begins(text: str) -> bool:
        """Whether a traceback begins with this line."""
        return _HEAD in text

    @property
    def is_lost(self) -> bool:
        """Whether its end can no longer be expected."""
        return self._stray > _MOST_STRAY_LINES

    def add(self, text: str) -> Raised | None:
        """Take a line; the exception when the traceback ends with it."""
        depth = len(text) - len(text.lstrip(_INDENTS))
        if frame := _FRAME.match(text) or _BOXED.match(text):
            self._add_frame(frame)
            self._depth = depth
            return None
        text = text[depth:]
        is_code = depth > 0 and depth >= self._depth  # a frame's line, as `else: raise Bad(x)`
        ended = _EXCEPTION.match(text) if self._inner and not is_code else None
        if ended and ended["kind"].endswith("ExceptionGroup"):
            return None
        if ended and (ended["text"] is not None or "." in text or text[0].isupper()):
            return Raised(ended["kind"], (ended["text"] or "")[:1000], self._frames())
        self._stray += 1
        return None

    def _add_frame(self, match: re.Match[str]) -> None:
        frame = TracebackFrame(match["file"], int(match["line"][:9]), (match["name"] or "")[:80])
        self._stray, self._inner = 0, frame
        if not _LIBRARY.search(frame.file):
            self._user = [*self._user, frame][-_MOST_FRAMES:]

    def _frames(self) -> tuple[TracebackFrame, ...]:
        if self._user:
            return tuple(self._user)
        return (self._inner,) if self._inner else ()


def innermost(frames: Sequence[TracebackFrame]) -> str:
    """The function in which it was raised; empty where nobody knows."""
    return frames[-1].function if frames else ""
