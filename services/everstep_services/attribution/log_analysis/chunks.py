"""Files in pieces, and the few lines in them that can mean anything.

Most lines of a training's log differ from earlier ones in digits only. What remains of a line
without its digits is its shape. A shape without any word of the rules is remembered as quiet, and
all lines of it are passed over at the cost of one look into a set.
"""

import re
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 1 << 20
MOST_LINE_BYTES = 64 << 10
"""More of a line is not looked at."""
_DROPPED = b"0123456789.+-\r"
_MOST_SHAPES = 20_000
_LONGEST_SHAPE = 1024
_PROGRESS = (b"iteration", b"step", b"epoch", b"loss")
_KEPT_PROGRESS = 3
_COUNTED = re.compile(rb"(?i)(?:iter(?:ation)?|step|epoch|loss)\W{0,12}\d")
_MOST_LOOKS = 200
_STEM_BYTES = 4


class Line(NamedTuple):
    """One line of a file that has a word of the rules, or that somebody wanted to see."""

    number: int
    content: bytes
    shape: bytes


def shape_of(content: bytes) -> bytes:
    """A line without what changes from one to the next."""
    return content.translate(None, _DROPPED)


class Shapes:
    """Which shapes of lines are quiet, for all files together."""

    def __init__(self, words: Collection[str]) -> None:
        self._words = _by_stem({shape_of(word.lower().encode()) for word in words})
        self.quiet: set[bytes] = set()
        self._loud: set[bytes] = set()
        self.progress: set[bytes] = set()

    def learn(self, shapes: Collection[bytes]) -> None:
        """Look for words in each shape that has not been seen before."""
        fresh = set(shapes) - self.quiet - self._loud
        if not fresh:
            return
        if len(self.quiet) + len(self._loud) + len(fresh) > _MOST_SHAPES:
            self.quiet.clear()
            self._loud.clear()
            self.progress.clear()
            fresh = set(shapes)
        together = b"\n".join(fresh).lower()
        present = [
            word
            for stem, words in self._words.items()
            if stem in together
            for word in words
            if word in together
        ]
        for shape in fresh:
            lower = shape.lower()
            if any(word in lower for word in present):
                self._loud.add(shape)
            else:
                self.quiet.add(shape)
                if any(word in lower for word in _PROGRESS):
                    self.progress.add(shape)

    def silence(self, shape: bytes) -> None:
        """Pass over lines of this shape from now on."""
        if len(shape) <= _LONGEST_SHAPE:
            self._loud.discard(shape)
            self.quiet.add(shape)


def _by_stem(words: set[bytes]) -> dict[bytes, list[bytes]]:
    """Few short stems, one of them in each word, and the words of each."""
    stems: dict[bytes, list[bytes]] = {}
    left = set(words)
    while left:
        has: dict[bytes, set[bytes]] = {}
        for word in left:
            for at in range(max(1, len(word) - _STEM_BYTES + 1)):
                has.setdefault(word[at : at + _STEM_BYTES], set()).add(word)
        stem = min(has, key=lambda stem: (-len(has[stem]), stem))
        stems[stem] = sorted(has[stem])
        left -= has[stem]
    return stems


class LogFile:
    """One file, read once from its begin to its end."""

    def __init__(self, file: BinaryIO, shapes: Shapes) -> None:
        self._file = file
        self._shapes = shapes
        self._progress: deque[int] = deque(maxlen=_KEPT_PROGRESS)
        self.lines = 0
        self.bytes = 0
        self.cut_lines = 0
        self.wants_all = False
        """Set while lines without any word are wanted too: those of a traceback."""

    @property
    def progress_line(self) -> int:
        """Up to which line at least three lines about progress followed; 0 for none."""
        return self._progress[0] if len(self._progress) == _KEPT_PROGRESS else 0

    def loud_lines(self) -> Iterator[Line]:
        """The lines that have a word of the rules; all of them while `wants_all` is set."""
        for chunk in self._chunks():
            yield from self._of_chunk(chunk)

    def _of_chunk(self, chunk: bytes) -> Iterator[Line]:
        contents = chunk.split(b"\n")
        shapes = chunk.translate(None, _DROPPED).split(b"\n")
        long = [at for at, shape in enumerate(shapes) if len(shape) > _LONGEST_SHAPE]
        for at in long:
            shapes[at] = shapes[at][:_LONGEST_SHAPE]  # the words of a longer line stand in front
        self._shapes.learn(shapes)
        quiet, first = self._shapes.quiet, self.lines + 1
        self._see_progress(contents, shapes, first)
        at, end = 0, len(contents)
        loud = iter([at for at, shape in enumerate(shapes) if shape not in quiet])
        following = next(loud, end)
        while at < end:
            if not self.wants_all:
                at = max(at, following)
            while following <= at < end:
                following = next(loud, end)
            if at < end and (self.wants_all or shapes[at] not in quiet):
                yield Line(first + at, contents[at], shapes[at])
            at += 1
        self.lines += end

    def _see_progress(self, contents: list[bytes], shapes: list[bytes], first: int) -> None:
        """Note the last lines that count steps; a line of code that has the word counts nothing."""
        progress = self._shapes.progress
        candidates = (at for at in range(len(shapes) - 1, -1, -1) if shapes[at] in progress)
        latest: list[int] = []
        for at in islice(candidates, _MOST_LOOKS):
            if _COUNTED.search(contents[at][:MOST_LINE_BYTES]):
                latest.append(first + at)
                if len(latest) == _KEPT_PROGRESS:
                    break
        self._progress.extend(reversed(latest))

    def _chunks(self) -> Iterator[bytes]:
        """Whole lines, about a mebibyte at once; the rest of a line that is too long is left."""
        rest, is_cut = b"", False
        while block := self._file.read(CHUNK_BYTES):
            self.bytes += len(block)
            if is_cut:
                _, found, block = block.partition(b"\n")
                if not found:
                    continue
                is_cut = False
            whole, found, tail = block.rpartition(b"\n")
            if found:
                yield rest + whole
                rest = tail
            else:
                rest += block
            if len(rest) > CHUNK_BYTES:
                self.cut_lines += 1
                yield rest[:MOST_LINE_BYTES]
                rest, is_cut = b"", True
        if rest:
            yield rest
