"""Lines that differ only in numbers that no answer depends on: these mean the same.

Each turn of a crash loop writes other times, processes, addresses and steps. Which numbers of a
line matter is not listed here: the line is read with other digits in their places, and a number
matters if the line then means something else. That is exact for patterns that look for any
digits of that many; a line in which a rule could find certain digits keeps all of its numbers.
"""

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal, TypeAlias

from everstep_services.attribution.log_analysis.chunks import LONGEST_LINE, text_of
from everstep_services.attribution.log_analysis.parsed_line import ParsedLine
from everstep_services.attribution.log_analysis.rules import LogRules

_DIGITS = b"0123456789"
_ZEROS, _THREES, _SEVENS = (bytes.maketrans(_DIGITS, digit * 10) for digit in (b"0", b"3", b"7"))
_NUMBER = re.compile(rb"\d+")
_ADDRESS, _SOME_ADDRESS = b"\xffx", b"0x7a7a7"
"""What stands for an address in a line, and where it is read."""
_LEAST_ALIKE = 4
"""When that many lines differ in digits only, it pays to learn which digits matter."""
_MOST_BYTES = 8 << 20
_MOST_SEEN_BYTES = 1 << 20
_OF_TEMPLATE = 1024
"""What a template needs besides its line."""
_MOST_NUMBERS = 4096
_MOST_DIGITS = 64
"""At most as many are distinguished where a rule looks for certain digits."""


class LineTemplates:
    """The meanings of the lines of all files."""

    def __init__(self, rules: LogRules) -> None:
        self._rules = rules
        self._address = _address(frozenset(rules.words))
        self._templates: dict[bytes, _Template] = {}
        """By lines whose digits are all zeros."""
        self._seen: dict[bytes, int] = {}
        """How often lines without a template came."""
        self._meanings: dict[Hashable, ParsedLine] = {}
        self._bytes = self._seen_bytes = 0

    def of_lines(self, contents: Sequence[bytes]) -> Sequence[ParsedLine | None]:
        """What many lines mean, as far as it is known."""
        lines = contents
        joined = b"\n".join(contents)
        if b"0x" in joined:
            joined = self._address.sub(_ADDRESS, joined)
            lines = joined.split(b"\n")
        masks = joined.translate(_ZEROS).split(b"\n")
        meanings: list[Any] = list(map(self._templates.get, masks))
        for at in [at for at, it in enumerate(meanings) if it.__class__ is not ParsedLine and it]:
            meanings[at] = meanings[at].meaning(lines[at], contents[at])
        return meanings

    def meaning(self, content: bytes) -> ParsedLine:
        """What a line means."""
        line = self._address.sub(_ADDRESS, content) if b"0x" in content else content
        mask = line.translate(_ZEROS)
        template = self._templates.get(mask)
        if template is None:
            seen = self._seen.get(mask, 0) + 1
            if seen < _LEAST_ALIKE:
                self._count(mask, seen)
                return ParsedLine(self._rules, content)
            self._take_room(len(mask))
            template = self._templates[mask] = self._template(content, line)
        meaning = _meaning(template, line, content)
        return meaning or ParsedLine(self._rules, content)

    def _count(self, mask: bytes, seen: int) -> None:
        self._seen_bytes += len(mask)
        if self._seen_bytes > _MOST_SEEN_BYTES:
            self._seen_bytes = 0
            self._seen.clear()
        self._seen[mask] = seen

    def _take_room(self, size: int) -> None:
        self._bytes += size + _OF_TEMPLATE
        if self._bytes > _MOST_BYTES:
            self._bytes = 0
            self._templates.clear()
            self._meanings.clear()

    def _shared(self, content: bytes) -> ParsedLine:
        """What a line means, as one object for all that mean the same."""
        self._take_room(len(content))
        meaning = ParsedLine(self._rules, content)
        meaning.is_shared = True
        return self._meanings.setdefault(meaning.structure, meaning)

    def _template(self, content: bytes, line: bytes) -> "_Template":
        spans = [match.span() for match in _NUMBER.finditer(line)]
        if not spans and line == content:
            return self._shared(content)
        certain = self._certain(content, line, spans)
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
        own = self._shared(content)
        live = self._live(own, line, spans)
        if live is None:
            return False
        return _OfNumbers(self._shared, [slice(*span) for span in live]) if live else own

    def _certain(
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

    def _live(
        self, own: ParsedLine, line: bytes, spans: Sequence[tuple[int, int]]
    ) -> Sequence[tuple[int, int]] | None:
        """The numbers that matter to what a line means; None if any digit may."""
        meaning = self._structure(_changed(line, spans, _SEVENS))
        live = list(self._of_other_meaning(line, spans, spans, meaning))
        if live:
            dead = [span for span in spans if span not in live]
            meaning = self._structure(_changed(line, dead, _SEVENS))
        return live if own.structure == meaning and own.year is None else None

    def _of_other_meaning(
        self,
        line: bytes,
        spans: Sequence[tuple[int, int]],
        part: Sequence[tuple[int, int]],
        meaning: Hashable,
    ) -> Iterator[tuple[int, int]]:
        """The numbers of a part whose digits change what the line means."""
        changed = _changed(_changed(line, spans, _SEVENS), part, _THREES)
        if not part or self._structure(changed) == meaning:
            return
        if len(part) == 1:
            yield part[0]
            return
        half = len(part) // 2
        for side in (part[:half], part[half:]):
            yield from self._of_other_meaning(line, spans, side, meaning)

    def _structure(self, line: bytes) -> Hashable:
        return ParsedLine(self._rules, line.replace(_ADDRESS, _SOME_ADDRESS)).structure


@lru_cache(maxsize=2)
def _address(words: Collection[str]) -> re.Pattern[bytes]:
    """The pattern of addresses that have no word of the rules."""
    spelled = "|".join(sorted(word for word in words if re.fullmatch("[a-f]+", word)))
    unless = f"(?![0-9a-fA-F]*(?i:{spelled}))" if spelled else ""
    # a pattern that begins with a letter is found fastest
    return re.compile(rf"0x(?<!\w0x){unless}[0-9a-fA-F]{{5,}}\b".encode())


class _OfNumbers:
    """A kind of line, and where its numbers are that matter."""

    def __init__(self, meaning_of: Callable[[bytes], ParsedLine], places: Sequence[slice]) -> None:
        self._meaning_of, self._places = meaning_of, places
        self._meanings: dict[Hashable, ParsedLine] = {}

    def meaning(self, line: bytes, content: bytes) -> ParsedLine:
        """What a line of this kind means."""
        numbers = line[self._places[0]] if len(self._places) == 1 else _at(line, self._places)
        meaning = self._meanings.get(numbers)
        if meaning is None:
            if len(self._meanings) >= _MOST_NUMBERS:
                self._meanings.clear()
            meaning = self._meanings[numbers] = self._meaning_of(content)
        return meaning


class _OfDigits:
    """A kind of line, and where a rule looks for certain digits."""

    def __init__(
        self,
        template_of: "Callable[[bytes, bytes, Sequence[tuple[int, int]]], _Template]",
        spans: Sequence[tuple[int, int]],
    ) -> None:
        self._template_of, self._spans = template_of, spans
        self._places = [slice(*span) for span in spans]
        self._templates: dict[Hashable, _Template] = {}

    def meaning(self, line: bytes, content: bytes) -> ParsedLine | Literal[False]:
        """What a line with the same digits means, if others may mean the same."""
        digits = _at(line, self._places)
        template = self._templates.get(digits)
        if template is None:
            if len(self._templates) >= _MOST_DIGITS:
                return False
            template = self._templates[digits] = self._template_of(content, line, self._spans)
        return _meaning(template, line, content)


_Template: TypeAlias = ParsedLine | _OfNumbers | _OfDigits | Literal[False]
"""The meaning, if no number matters; False if each does."""


def _meaning(template: _Template, line: bytes, content: bytes) -> ParsedLine | Literal[False]:
    if isinstance(template, _OfNumbers | _OfDigits):
        return template.meaning(line, content)
    return template


def _at(line: bytes, places: Sequence[slice]) -> tuple[bytes, ...]:
    return tuple([line[place] for place in places])


def _changed(line: bytes, spans: Sequence[tuple[int, int]], digits: bytes) -> bytes:
    """The line with other digits at some places."""
    changed = bytearray(line)
    for begin, end in spans:
        changed[begin:end] = line[begin:end].translate(digits)
    return bytes(changed)
