"""Python's tracebacks, put together from lines that may lie far apart."""

import keyword
import re
from collections.abc import Sequence

import msgspec

_HEAD = "Traceback (most recent call last)"
_FRAME = re.compile(
    r'^\s*(?:\| )?\s*File "(?P<file>[^"]{1,400})", line (?P<line>\d+)(?:, in (?P<name>.+))?'
)
_BOXED = re.compile(
    r"^\s*│ (?P<file>/[^:]{1,400}):(?P<line>\d+) in (?P<name>\S+)"  # rich
)
_EXCEPTION = re.compile(r"^(?P<kind>[A-Za-z_][\w.]*)(?::\s?(?P<text>.*))?$")
_LIBRARY = re.compile(
    r"site-packages/|dist-packages/|/lib/python\d|^<frozen |/torch/|/runpy\.py|^<string>"
)
_CHAINED = re.compile(
    r"^[\s|]*(?:The above exception was the direct cause of the following exception:"
    r"|During handling of the above exception, another exception occurred:)"
)
CHAIN_WORDS = ("the above exception",)
"""In each line that links two exceptions."""
_INDENT = re.compile(r"(?:[ +]*\| ?)?(?P<indent>\s*)")
"""The spaces before a line; in the box of an exception group, those inside it."""
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
    is_uncaught: bool = False
    """Whether it went through the whole script: that ended the process."""


class Traceback:
    """A traceback of one origin that is not over."""

    def __init__(self, *, is_of_end: bool = True) -> None:
        self.is_of_end = is_of_end
        """Whether what it reports could end a script."""
        self._user: list[TracebackFrame] = []
        self._outermost = ""
        """The function of the first frame."""
        self._inner: TracebackFrame | None = None
        self._indent = 0
        """The spaces before the lines of frames: source lines have more, the exception fewer."""
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
        if frame := _FRAME.match(text) or _BOXED.match(text):
            self._add_frame(frame)
            self._indent = _indent_of(text)
            return None
        is_source = _indent_of(text) > self._indent or 0 < self._indent == _indent_of(text)
        text = text.lstrip(" |+")
        ended = _EXCEPTION.match(text) if self._inner and not is_source else None
        if ended and self._indent == 0 and not _is_class(ended["kind"]):
            ended = None  # without indents, only the names tell code and exceptions apart
        if ended and ended["kind"].endswith("ExceptionGroup"):
            return None
        if ended and (ended["text"] is not None or "." in text or text[0].isupper()):
            is_uncaught = self._outermost == "<module>"
            return Raised(ended["kind"], (ended["text"] or "")[:1000], self._frames(), is_uncaught)
        self._stray += 1
        return None

    def _add_frame(self, match: re.Match[str]) -> None:
        frame = TracebackFrame(match["file"], int(match["line"][:9]), (match["name"] or "")[:80])
        self._stray, self._inner = 0, frame
        self._outermost = self._outermost or frame.function
        if not _LIBRARY.search(frame.file):
            self._user = [*self._user, frame][-_MOST_FRAMES:]

    def _frames(self) -> tuple[TracebackFrame, ...]:
        if self._user:
            return tuple(self._user)
        return (self._inner,) if self._inner else ()


def links_exceptions(text: str) -> bool:
    """Whether the line joins a traceback to the next: the exception before it was not the last."""
    return _CHAINED.match(text) is not None


def _indent_of(text: str) -> int:
    match = _INDENT.match(text)
    return len(match["indent"]) if match else 0


def _is_class(name: str) -> bool:
    """Whether it is the name of a class, by the usual spelling."""
    return not keyword.iskeyword(name) and name.rpartition(".")[2][:1].isupper()


def innermost(frames: Sequence[TracebackFrame]) -> str:
    """The function in which it was raised; empty where nobody knows."""
    return frames[-1].function if frames else ""
