"""Files in pieces, and the few lines in them that can mean anything.

Most lines of a training's log differ from earlier ones in digits only. What remains of a line
without its digits is its shape. A shape without any word of the rules is remembered as quiet, and
all lines of it are passed over at the cost of one look into a set.
"""

import re
import sys
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cached_property, lru_cache
from itertools import accumulate, islice
from typing import TYPE_CHECKING, BinaryIO, TypeAlias

if TYPE_CHECKING:
    from everstep_services.attribution.log_analysis.word_filter import WordFilter

CHUNK_BYTES = 1 << 20
_DROPPED = b"0123456789.+-\r"
_MOST_SHAPES = 20_000
_LONGEST_SHAPE = 1024
_LEAST_FILTERED = 256 << 10
"""From this many bytes without a known shape on, starting the filter pays off."""
_LEAST_COMPILED = 8 << 10
"""In a shorter text, each word is looked for faster than a pattern of all is compiled."""
LONGEST_LINE = 4096
"""Of a longer line only what stands around words of the rules is looked at."""
_BEFORE_WORD = 512
_AFTER_WORD = 1536
_MOST_WINDOWS = 8
_PROGRESS = (b"iteration", b"step", b"epoch", b"loss")
_PROGRESS_WORD = re.compile(b"|".join(_PROGRESS))
_COUNTED = re.compile(rb"(?i)(?:iter(?:ation)?|step|epoch|loss)\W{0,12}\d")
_LOOKED_AT = 400
_MOST_LOOKS = 512
_MOST_SEARCHED = 512
_MOST_BEFORE = 64
"""Lines about progress before a failure, and the lines in which they are looked for."""
_ESCAPES = re.compile(
    rb"\x1b(?:\[[0-?]{0,32}[ -/]{0,8}[@-~]|\][^\x07\x1b\n]{0,256}(?:\x07|\x1b\\)?)"
)
_PREFIX = re.compile(
    rb"(?:\[[^\]]{1,60}\](?:<\w{1,8}>)?:? ?|\([^)]{1,60}\) |\d{1,6}: |[\w.:-]{1,80}\| ?){0,4}"
)
_ZEROS = bytes(CHUNK_BYTES)

_SAMPLE_BYTES = 4096
_END_BYTES = 256
_NOT_TEXT = bytes(set(range(32)) - set(b"\t\n\r\b\f\x1b")) + b"\x7f"
_MOST_UNCLEAR = 4
"""A quarter of the bytes may be damaged, or names in an older encoding."""

Shape: TypeAlias = bytes | int
"""A line without what changes from one to the next; of a long line its hash."""


def text_of(content: bytes) -> str:
    """A line as it is read."""
    text = content.decode("utf-8", "replace").rstrip("\r")
    return text.replace("\0", "")[:LONGEST_LINE]


def shape_of(content: bytes) -> bytes:
    """A line without what changes from one to the next."""
    return content.translate(None, _DROPPED)


class _Words:
    """The words of rules, as they are looked for."""

    def __init__(self, words: Collection[str]) -> None:
        self.spelled = sorted({word.lower().encode() for word in words})
        self.shaped = {shape_of(word) for word in self.spelled}

    @cached_property
    def pattern(self) -> re.Pattern[bytes]:
        """A pattern for any of them in shapes."""
        return re.compile(_one_of(self.shaped))

    @cached_property
    def filter(self) -> "WordFilter":
        """What finds them in long texts. Raises ImportError without numpy."""
        from everstep_services.attribution.log_analysis.word_filter import WordFilter

        return WordFilter([*self.shaped, *_PROGRESS])


_words = lru_cache(maxsize=2)(_Words)


class Shapes:
    """Which shapes of lines are quiet, for all files together."""

    def __init__(self, words: Collection[str], least_filtered: int = _LEAST_FILTERED) -> None:
        self._words = _words(frozenset(words))
        self._least_filtered = least_filtered
        self.quiet: set[Shape] = set()
        self._loud: set[Shape] = set()
        self.progress: set[Shape] = set()

    def learn(self, shapes: Set[Shape], long: Mapping[int, bytes] | None = None) -> None:
        """Look for words in each shape not seen before; `long` has the texts of hashes."""
        fresh = shapes - self.quiet - self._loud
        if not fresh:
            return
        if len(self.quiet) + len(self._loud) + len(fresh) > _MOST_SHAPES:
            self.quiet.clear()
            self._loud.clear()
            self.progress.clear()
            fresh = set(shapes)
        texts = [_text_of(shape, long) for shape in fresh] if long else fresh
        loud, progress = self._with_words(b"\n".join(texts).lower())  # type: ignore[arg-type]
        self.quiet |= fresh
        if loud or progress:
            ordered = list(fresh)
            self._loud.update(ordered[at] for at in loud)
            self.quiet -= self._loud
            self.progress.update(ordered[at] for at in progress - loud)

    def _with_words(self, text: bytes) -> tuple[set[int], set[int]]:
        """The numbers of the lines that have a word of the rules, and one about progress."""
        loud: set[int] = set()
        progress: set[int] = set()
        for line, word in self._finder(len(text))(text):
            (progress if word in _PROGRESS else loud).add(line)
        return loud, progress

    def _finder(self, size: int) -> Callable[[bytes], Iterable[tuple[int, bytes]]]:
        """What finds words in a text of this size fastest: without numpy the regular expression."""
        if size >= self._least_filtered:
            try:
                return self._words.filter.words_of_lines
            except ImportError:
                self._least_filtered = sys.maxsize
        return self._searched if size >= _LEAST_COMPILED else self._looked_for

    def _searched(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        ends = list(accumulate(len(line) + 1 for line in text.split(b"\n")))
        for pattern in (self._words.pattern, _PROGRESS_WORD):
            for match in pattern.finditer(text):
                yield bisect_right(ends, match.start()), match[0]

    def _looked_for(self, text: bytes) -> Iterator[tuple[int, bytes]]:
        ends = list(accumulate(len(line) + 1 for line in text.split(b"\n")))
        for word in (*self._words.shaped, *_PROGRESS):
            at = text.find(word)
            while at >= 0:
                line = bisect_right(ends, at)
                yield line, word
                at = text.find(word, ends[line])

    def silence(self, shape: Shape) -> None:
        """Pass over lines of this shape from now on."""
        self._loud.discard(shape)
        self.quiet.add(shape)

    def windows(self, content: bytes) -> list[bytes]:
        """What stands around words of the rules in a very long line, in the order of the line."""
        lower = content.lower()
        places = sorted(
            at for word in self._words.spelled for at in _first_places(lower, word, _MOST_WINDOWS)
        )
        prefix = _PREFIX.match(content[:_LOOKED_AT])
        windows: list[bytes] = []
        end = -1
        for at in places:
            if at >= end and len(windows) < _MOST_WINDOWS:
                begin, end = max(0, at - _BEFORE_WORD), at + _AFTER_WORD
                whose = prefix[0] if prefix and begin else b""
                windows.append(whose + content[begin:end])
        return windows or [content[:LONGEST_LINE]]


def _text_of(shape: Shape, long: Mapping[int, bytes]) -> bytes:
    return shape if isinstance(shape, bytes) else long[shape]


def _first_places(text: bytes, word: bytes, most: int) -> Iterator[int]:
    at = text.find(word)
    while at >= 0 and most > 0:
        yield at
        most -= 1
        at = text.find(word, at + _AFTER_WORD)


def _one_of(words: Collection[bytes]) -> bytes:
    """A pattern for any of the words that looks at each character once."""
    tails: dict[bytes, list[bytes]] = {}
    for word in sorted(words):
        if not word:
            return b""
        tails.setdefault(word[:1], []).append(word[1:])
    parts = [re.escape(head) + _one_of(rest) for head, rest in tails.items()]
    return parts[0] if len(parts) == 1 else b"(?:" + b"|".join(parts) + b")"


class LogFile:
    """One file, read once from its begin to its end.

    A line that carriage returns overwrite (a progress bar) is as many lines with one number. A
    line longer than a chunk is looked at in pieces.
    """

    def __init__(self, file: BinaryIO, shapes: Shapes) -> None:
        self._file = file
        self._shapes = shapes
        self._progress: deque[tuple[int, bytes]] = deque(maxlen=_MOST_LOOKS)
        self.lines = 0
        self.bytes = 0
        self._samples = 0
        self._unclear = 0
        """The samples that are not text."""
        self._end = b""
        self.contents: Sequence[bytes] = ()
        self.shapes: Sequence[Shape] = ()
        """The lines of the chunk, and their shapes."""
        self.numbers: Sequence[int] = ()
        self.loud: Sequence[int] = ()
        """The indices of the lines of the chunk that have words of the rules."""
        self.steps: Sequence[int] = ()
        """The indices of its lines about progress."""
        self._near: deque[tuple[int, str]] = deque(maxlen=_MOST_BEFORE)
        """The last lines of the chunk that count steps, and their indices."""
        self._last: deque[tuple[Sequence[bytes], Sequence[int]]] = deque(maxlen=2)
        """The lines of the last two chunks."""

    @property
    def progress(self) -> Sequence[tuple[int, bytes]]:
        """The numbers and contents of the last lines about progress."""
        return list(self._progress)

    @property
    def is_mostly_text(self) -> bool:
        """Whether most of the file is text: only there can words be found."""
        return 2 * self._unclear <= self._samples

    @property
    def has_readable_end(self) -> bool:
        """Whether the last bytes are text: zeros and noise stand in place of a lost end."""
        return _is_text(self._end)

    def chunks(self) -> Iterator[None]:
        """Read one chunk after the other."""
        has_open_line = False
        for chunk, has_end in self._chunks():
            self._begin(chunk)
            yield
            self.lines += chunk.count(b"\n") + has_end
            has_open_line = not has_end
        self.lines += has_open_line

    def _begin(self, chunk: bytes) -> None:
        first = self.lines + 1
        if b"\x1b" in chunk:
            chunk = _ESCAPES.sub(b"", chunk)
        contents = chunk.split(b"\n")
        numbers: Sequence[int] = range(first, first + len(contents))
        if b"\r" in chunk and b"\r" in chunk.replace(b"\r\n", b""):
            contents, numbers = _overwritten(contents, first)
            chunk = b"\n".join(contents)
        shapes, kinds, long = _shapes(chunk)
        self._shapes.learn(kinds, long)
        self.contents, self.shapes, self.numbers = contents, shapes, numbers
        quiet, progress = self._shapes.quiet, self._shapes.progress
        self.loud = self.steps = ()
        if not kinds <= quiet:
            self.loud = [at for at, shape in enumerate(shapes) if shape not in quiet]
        if not kinds.isdisjoint(progress):
            self.steps = [at for at, shape in enumerate(shapes) if shape in progress]
        self._last.append((contents, numbers))
        self._near.clear()
        self._see_progress()

    def counts(self, at: int) -> bool:
        """Whether a line about progress counts steps."""
        return _counts(self.contents[at])

    def parts(self, at: int) -> Sequence[bytes]:
        """What is looked at of a line: parts of it where it is very long."""
        content = self.contents[at]
        if len(content) <= LONGEST_LINE:
            return (content,)
        is_loud = self.shapes[at] not in self._shapes.quiet
        return self._shapes.windows(content) if is_loud else (content[:LONGEST_LINE],)

    def tail(self, size: int) -> tuple[list[tuple[int, bytes]], bool]:
        """The last lines, of this number of bytes, and whether they are all lines of the file."""
        lines: list[tuple[int, bytes]] = []
        for contents, numbers in reversed(self._last):
            for at in range(len(contents) - 1, -1, -1):
                size -= len(contents[at]) + 1
                if size < 0:
                    return lines[::-1], False
                lines.append((numbers[at], contents[at]))
        return lines[::-1], self.bytes <= CHUNK_BYTES

    def progress_before(self, at: int) -> list[str]:
        """The last lines about progress before a line of the chunk, in their order."""
        begin = max(0, at - _MOST_SEARCHED)
        steps, near = self.steps, self._near
        first = max(begin, near[-1][0] + 1 if near else 0)
        for step in steps[bisect_left(steps, first) : bisect_left(steps, at)]:
            text = _counted(self.contents[step][:_LOOKED_AT])
            if text is not None:
                near.append((step, text))
        while near and near[0][0] < begin:
            near.popleft()
        if not near:
            before = [content for number, content in self._progress if number < self.numbers[at]]
            return [content.decode("utf-8", "replace") for content in before[-_MOST_BEFORE:]]
        return [text for _, text in near]

    def _see_progress(self) -> None:
        """Note the last lines that count steps; a line of code that has the word counts nothing."""
        latest = [
            (self.numbers[at], self.contents[at][:_LOOKED_AT])
            for at in islice(reversed(self.steps), _MOST_LOOKS)
            if _counts(self.contents[at])
        ]
        self._progress.extend(reversed(latest))

    def _chunks(self) -> Iterator[tuple[bytes, bool]]:
        """About a mebibyte at once, and whether its last line ends with it."""
        rest = b""
        while block := self._file.read(CHUNK_BYTES):
            self.bytes += len(block)
            self._samples += 1
            self._unclear += not _is_text(block[:_SAMPLE_BYTES])
            self._end = (self._end + block[-_END_BYTES:])[-_END_BYTES:]
            if block == _ZEROS[: len(block)]:  # a hole of a sparse file
                continue
            whole, separator, tail = block.rpartition(b"\n")
            if separator:
                yield rest + whole, True
                rest = tail
            else:
                rest += block
            if len(rest) > CHUNK_BYTES:
                whole, separator, tail = rest.rpartition(b"\r")
                yield (whole if separator else rest), False
                rest = tail if separator else b""
        if rest:
            yield rest, False


def _counts(content: bytes) -> bool:
    return _COUNTED.search(content, 0, _LOOKED_AT) is not None


@lru_cache(maxsize=4096)
def _counted(content: bytes) -> str | None:
    """The text of a line that counts steps: a failure that comes again has the same before."""
    return content.decode("utf-8", "replace") if _counts(content) else None


def _is_text(sample: bytes) -> bool:
    clean = sample.translate(None, _NOT_TEXT)
    unclear = len(sample) - len(clean) + clean.decode("utf-8", "replace").count("\ufffd")
    return _MOST_UNCLEAR * unclear <= len(sample)


def _overwritten(contents: Sequence[bytes], first: int) -> tuple[list[bytes], list[int]]:
    """Each line as the lines that carriage returns make of it."""
    parts: list[bytes] = []
    numbers: list[int] = []
    for number, content in enumerate(contents, first):
        if b"\r" not in content:
            parts.append(content)
            numbers.append(number)
            continue
        split = [part for part in content.split(b"\r") if part] or [b""]
        parts += split
        numbers += [number] * len(split)
    return parts, numbers


def _shapes(chunk: bytes) -> tuple[list[Shape], set[Shape], dict[int, bytes]]:
    """The shape of each line of a chunk, all of them, and the texts of those that are hashes."""
    shapes: list[Shape] = list(chunk.translate(None, _DROPPED).split(b"\n"))
    kinds, long = set(shapes), dict[int, bytes]()
    if max(map(len, kinds)) > _LONGEST_SHAPE:  # type: ignore[arg-type]
        for at, shape in enumerate(shapes):
            if isinstance(shape, bytes) and len(shape) > _LONGEST_SHAPE:
                shapes[at] = key = hash(shape)
                long[key] = shape
        kinds = set(shapes)
    return shapes, kinds, long
