"""Python's tracebacks, put together from lines that may lie far apart."""

import keyword
import re
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

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
MOST_FRAMES = 3
_MOST_STRAY_LINES = 40

Source = TypeVar("Source")


class TracebackFrame(msgspec.Struct, frozen=True):
    """One place in the code."""

    file: str
    line: int
    function: str


class TracebackLine(NamedTuple):
    """What a line can be in a traceback, whatever stands before it."""

    indent: int
    function: str | None = None
    """The function of a frame."""
    is_user: bool = False
    """Whether the frame is not of a library."""
    kind: str = ""
    """The type of an exception."""
    message: str = ""
    is_class: bool = False
    """Whether the type is spelled as a class usually is."""
    is_whole: bool = False
    """Whether the line is an exception and not only a word."""

    @classmethod
    def of(cls, text: str) -> "TracebackLine":
        """Read a line."""
        indent = _indent_of(text)
        if frame := _FRAME.match(text) or _BOXED.match(text):
            is_user = not _LIBRARY.search(frame["file"])
            return cls(indent, (frame["name"] or "")[:80], is_user)
        text = text.lstrip(" |+")
        if ended := _EXCEPTION.match(text):
            kind, message = ended["kind"], ended["text"]
            is_whole = message is not None or "." in text or text[0].isupper()
            text = (message or "")[:1000]
            return cls(indent, kind=kind, message=text, is_class=_is_class(kind), is_whole=is_whole)
        return cls(indent)


class Traceback(Generic[Source]):
    """A traceback of one origin that is not over; of its frames it keeps the sources."""

    __slots__ = ("_indent", "_inner", "_outermost", "_stray", "_user", "begin", "is_of_end")

    def __init__(self, begin: int = -1, *, is_of_end: bool = True) -> None:
        self.begin = begin
        """The index of its first line."""
        self.is_of_end = is_of_end
        """Whether what it reports could end a script."""
        self._user: list[tuple[str, Source]] = []
        self._outermost = ""
        """The function of the first frame."""
        self._inner: tuple[str, Source] | None = None
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

    @property
    def is_uncaught(self) -> bool:
        """Whether the exception went through the whole script: that ended the process."""
        return self._outermost == "<module>"

    @property
    def innermost(self) -> str:
        """The function in which it was raised; of user code, where there is any."""
        return self._frames[-1][0]

    @property
    def sources(self) -> Sequence[Source]:
        """The innermost frames; those of user code, where there are any."""
        return [source for _, source in self._frames]

    @property
    def _frames(self) -> Sequence[tuple[str, Source]]:
        return self._user or ([self._inner] if self._inner else [])

    def take(self, line: TracebackLine, source: Source) -> bool:
        """Take a line. Returns whether the traceback ends with it."""
        if line.function is not None:
            self._stray, self._indent = 0, line.indent
            self._inner = (line.function, source)
            self._outermost = self._outermost or line.function
            if line.is_user:
                self._user = [*self._user, self._inner][-MOST_FRAMES:]
            return False
        indent = self._indent
        is_source = line.indent > indent or 0 < indent == line.indent
        # without indents, only the names tell code and exceptions apart
        if line.kind and self._inner and not is_source and (indent or line.is_class):
            if line.kind.endswith("ExceptionGroup"):
                return False
            if line.is_whole:
                return True
        self._stray += 1
        return False


def frame_of(text: str) -> TracebackFrame:
    """The frame that a line names."""
    match = _FRAME.match(text) or _BOXED.match(text)
    assert match is not None
    return TracebackFrame(match["file"], int(match["line"][:9]), (match["name"] or "")[:80])


def links_exceptions(text: str) -> bool:
    """Whether the line joins a traceback to the next: the exception before it was not the last."""
    return _CHAINED.match(text) is not None


def _indent_of(text: str) -> int:
    match = _INDENT.match(text)
    return len(match["indent"]) if match else 0


def _is_class(name: str) -> bool:
    """Whether it is the name of a class, by the usual spelling."""
    return not keyword.iskeyword(name) and name.rpartition(".")[2][:1].isupper()
