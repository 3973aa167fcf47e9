"""Keys of lines: equal where lines differ only in numbers that no answer depends on.

Each turn of a crash loop writes other times, processes, addresses and steps. Which numbers of a
line matter is not listed here: the line is read with other digits in their places, and a number
matters if the analysis then reads something else. That is exact for patterns that look for any
digits of that many; a line in which a rule could find certain digits keeps all of its numbers.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Literal, TypeAlias

from everstep_services.attribution.log_analysis.chunks import LONGEST_LINE, text_of
from everstep_services.attribution.log_analysis.line_analysis import SUMMARY, LineAnalysis
from everstep_services.attribution.log_analysis.origins import Origin, of_line
from everstep_services.attribution.log_analysis.repeats import BlockEffect, Key
from everstep_services.attribution.log_analysis.rules import LogRules
from everstep_services.attribution.log_analysis.tracebacks import Traceback

_DIGITS = b"0123456789"
_ZEROS, _THREES, _SEVENS = (bytes.maketrans(_DIGITS, digit * 10) for digit in (b"0", b"3", b"7"))
_NUMBER = re.compile(rb"\d+")
_ADDRESS, _SOME_ADDRESS = b"\xffx", b"0x7a7a7"
"""What stands for an address in a line, and where it is read."""
_LEAST_ALIKE = 4
"""From that many lines on that differ in digits only, it pays to learn which digits matter."""
_MOST_LEARNED = 256
"""As many kinds of lines are learned with each chunk."""
_MOST_KEYS = 100_000
_MOST_DIGITS = 64
"""At most as many are distinguished where a rule looks for certain digits."""
_FRAME = '  File "/lib/python3/site-packages/a.py", line 1, in f'


class LineKeys:
    """The keys of lines of all files."""

    def __init__(self, rules: LogRules) -> None:
        self._reader = _LineReader(rules)
        words = "|".join(sorted(word for word in rules.words if re.fullmatch("[a-f]+", word)))
        unless = f"(?![0-9a-fA-F]*(?i:{words}))" if words else ""
        # a pattern that begins with a letter is found fastest
        self._address = re.compile(rf"0x(?<!\w0x){unless}[0-9a-fA-F]{{5,}}\b".encode())
        self._numbers = count()
        self._ids: dict[Hashable, int] = {}
        self._templates: dict[bytes, _Template] = {}
        """By lines whose digits are all zeros."""

    def __call__(self, contents: Sequence[bytes], progress: Collection[int]) -> Sequence[Key]:
        """The keys of lines; those about progress have their own."""
        lines = contents
        joined = b"\n".join(contents)
        if b"0x" in joined:
            joined = self._address.sub(_ADDRESS, joined)
            lines = joined.split(b"\n")
        masked = joined.translate(_ZEROS).split(b"\n")
        keys: list[Any] = list(map(self._templates.get, masked))
        if None in keys:
            self._learn(contents, lines, masked, _unknown(masked, keys, {*progress}))
            keys = list(map(self._templates.get, masked))
        for at in [at for at, template in enumerate(keys) if template.__class__ is not int]:
            template = keys[at]
            keys[at] = template.key(lines[at], contents[at]) if template else contents[at]
        return keys

    def _learn(
        self,
        contents: Sequence[bytes],
        lines: Sequence[bytes],
        masked: Sequence[bytes],
        unknown: Mapping[bytes, Sequence[int]],
    ) -> None:
        """Learn the most frequent kinds of lines."""
        if len(self._ids) + len(self._templates) > _MOST_KEYS:
            self._ids.clear()
            self._templates.clear()
        often = sorted(unknown.values(), key=len, reverse=True)
        for places in often[:_MOST_LEARNED]:
            if len(places) < _LEAST_ALIKE:
                break
            at = places[0]
            self._templates[masked[at]] = self._template(contents[at], lines[at])

    def _template(self, content: bytes, line: bytes) -> "_Template":
        spans = [match.span() for match in _NUMBER.finditer(line)]
        if not spans and line == content:
            return self._id(content)
        certain = self._reader.certain(content, line, spans)
        if certain is None:
            return False
        if certain:
            return _OfDigits(self._of_other_numbers, certain)
        return self._of_other_numbers(content, line, ())

    def _of_other_numbers(
        self, content: bytes, line: bytes, certain: Sequence[tuple[int, int]]
    ) -> "_Template":
        """The template of lines that have these digits at certain places."""
        spans = [span for match in _NUMBER.finditer(line) if (span := match.span()) not in certain]
        live = self._reader.live(content, line, spans)
        if live is None:
            return False
        meaning, numbers = live
        kind = (_NUMBER.sub(b"0", line), meaning, tuple(numbers), _at(line, certain))
        if not numbers:
            return self._id(kind)
        return _OfNumbers(self._id, kind, [spans[number] for number in numbers])

    def _id(self, kind: Hashable) -> int:
        number = self._ids.get(kind)
        if number is None:
            number = self._ids[kind] = next(self._numbers)
        return number


def _unknown(
    masked: Sequence[bytes], templates: Sequence[object], progress: Collection[int]
) -> Mapping[bytes, Sequence[int]]:
    """The lines without a template, those of one kind together."""
    kinds: dict[bytes, list[int]] = {}
    for at, template in enumerate(templates):
        if template is None and at not in progress:
            kinds.setdefault(masked[at], []).append(at)
    return kinds


class _OfNumbers:
    """A kind of line, and where its numbers are that matter."""

    def __init__(
        self,
        number_of: Callable[[Hashable], int],
        kind: Hashable,
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._number_of, self._kind = number_of, kind
        self._slices = [slice(*span) for span in spans]
        self._keys: dict[Hashable, int] = {}

    def key(self, line: bytes, _: bytes) -> Key:
        """The key of a line of this kind."""
        if len(self._slices) == 1:
            numbers: Hashable = line[self._slices[0]]
        else:
            numbers = tuple([line[place] for place in self._slices])
        key = self._keys.get(numbers)
        if key is None:
            if len(self._keys) > _MOST_KEYS // 16:
                self._keys.clear()
            key = self._keys[numbers] = self._number_of((self._kind, numbers))
        return key


class _OfDigits:
    """A kind of line, and where a rule looks for certain digits."""

    def __init__(
        self,
        template_of: "Callable[[bytes, bytes, Sequence[tuple[int, int]]], _Template]",
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._template_of, self._spans = template_of, spans
        self._templates: dict[Hashable, _Template] = {}

    def key(self, line: bytes, content: bytes) -> Key:
        """The key of a line of this kind."""
        digits = _at(line, self._spans)
        template = self._templates.get(digits)
        if template is None:
            if len(self._templates) >= _MOST_DIGITS:
                return content
            template = self._template_of(content, line, self._spans)
            self._templates[digits] = template
        if template is False:
            return content
        return template if isinstance(template, int) else template.key(line, content)


_Template: TypeAlias = int | _OfNumbers | _OfDigits | Literal[False]
"""The key, if no number matters; False if each does."""


def _at(line: bytes, spans: Sequence[tuple[int, int]]) -> tuple[bytes, ...]:
    return tuple([line[begin:end] for begin, end in spans])


class _LineReader:
    """Reads lines alone, to tell what of them matters."""

    def __init__(self, rules: LogRules) -> None:
        self._rules = rules

    def certain(
        self, content: bytes, line: bytes, spans: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]] | None:
        """The numbers that a rule may compare with others; None if all of them.

        `line` is the content without addresses.
        """
        text = text_of(line.replace(_ADDRESS, _SOME_ADDRESS))
        if len(content) > LONGEST_LINE or b"\\u" in content:
            return None
        places = self._rules.compared_digits(text)
        if places is None or (places and len(text) != len(line)):
            return None
        return [span for span in spans if any(span[0] <= at < span[1] for at in places)]

    def live(
        self, content: bytes, line: bytes, spans: Sequence[tuple[int, int]]
    ) -> tuple[Hashable, Sequence[int]] | None:
        """What a line means with any numbers, and those that matter; None if any digit may."""
        meaning = self._meaning(_changed(line, spans, _SEVENS))
        if meaning is None:
            return None
        numbers = list(self._of_other_meaning(line, spans, range(len(spans)), meaning))
        dead = [span for number, span in enumerate(spans) if number not in numbers]
        is_right = self._meaning(content) == self._meaning(_changed(line, dead, _SEVENS))
        return (meaning, numbers) if is_right else None

    def _of_other_meaning(
        self,
        line: bytes,
        spans: Sequence[tuple[int, int]],
        numbers: Sequence[int],
        meaning: Hashable,
    ) -> Iterator[int]:
        """The numbers whose digits change what the line means."""
        sevens = _changed(line, spans, _SEVENS)
        changed = _changed(sevens, [spans[at] for at in numbers], _THREES)
        if not numbers or self._meaning(changed) == meaning:
            return
        if len(numbers) == 1:
            yield numbers[0]
            return
        half = len(numbers) // 2
        for part in (numbers[:half], numbers[half:]):
            yield from self._of_other_meaning(line, spans, part, meaning)

    def _meaning(self, content: bytes) -> Hashable | None:
        """What the analysis takes from a line but descriptions, in and out of tracebacks."""
        line = text_of(content.replace(_ADDRESS, _SOME_ADDRESS))
        origin, _ = of_line(line, Origin(0))
        alone, within, of_summary = (_SingleLine(self._rules) for _ in range(3))
        meaning = alone.taken(line)
        if not alone.open_block.is_plain or alone.open_block.summaries:
            return None
        own = (origin.rank, origin.member, origin.node)
        return own, meaning, within.taken(line, origin), of_summary.taken_after(line, origin)


class _SingleLine(LineAnalysis):
    """An analysis that takes a line."""

    def taken(self, line: str, of_traceback: Origin | None = None) -> Hashable:
        """What it takes from a line, also where the origin has an open traceback."""
        if of_traceback is not None:
            self._open[of_traceback] = Traceback()
            self._open[of_traceback].add(_FRAME)
        means = self.add(Origin(0), 1, line)
        begun = frozenset(self._open)
        if of_traceback in self._open:
            self._add_to_traceback(of_traceback, 2, "E: e", "E: e")
        return self._told(means, begun)

    def taken_after(self, line: str, origin: Origin) -> Hashable:
        """The same, after a summary has named a rank of this origin, if that matters."""
        if not SUMMARY.match(line):
            return None
        self._summaries = {origin: 1}
        return self._told(self.add(Origin(0), 1, line), frozenset())

    def _told(self, means: bool, begun: frozenset[Origin]) -> Hashable:
        block = self.open_block
        return (
            means,
            block.year,
            begun,
            tuple(map(_structure, block.effects)),
            block.is_plain,
            tuple(block.processes),
        )


def _structure(effect: BlockEffect) -> Hashable:
    """A failure without what its lines alone describe: it is read again where it is reported."""
    failure = effect.failure
    return (
        effect.key, effect.peer, effect.raised, effect.is_uncaught, effect.work and effect.work[0],
        failure.rule, failure.failure_class, failure.domain, failure.role, failure.severity,
        effect.unsaid, failure.fingerprint, failure.member, failure.node, failure.clock,
    )  # fmt: skip


def _changed(line: bytes, spans: Sequence[tuple[int, int]], digits: bytes) -> bytes:
    """The line with other digits at some places."""
    changed = bytearray(line)
    for begin, end in spans:
        changed[begin:end] = line[begin:end].translate(digits)
    return bytes(changed)
