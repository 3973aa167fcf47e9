"""Files that people name, read one after the other into an analysis."""

import codecs
import errno
import os
import sys
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from everstep.evidence.files import open_regular
from everstep_services.attribution.log_analysis.analysis import LogAnalysis
from everstep_services.attribution.log_analysis.chunks import (
    LogFile,
    Shape,
    Shapes,
    text_of,
)
from everstep_services.attribution.log_analysis.file_lines import FileLine
from everstep_services.attribution.log_analysis.origins import Origin, of_file
from everstep_services.attribution.log_analysis.rules import LogRules, shipped

_GZIP = b"\x1f\x8b"
_COMPRESSED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"PK\x03\x04": "zip",
}
_WIDE = (
    (codecs.BOM_UTF32_LE, slice(6, None, 4), "utf-32-le"),
    (codecs.BOM_UTF32_BE, slice(5, None, 4), "utf-32-be"),
    (codecs.BOM_UTF16_LE, slice(3, None, 2), "utf-16-le"),
    (codecs.BOM_UTF16_BE, slice(2, None, 2), "utf-16-be"),
)
"""The mark, where text has zeros, and the encoding."""
_START_BYTES = 64
_GZIP_WINDOW = 31
_LONGEST_NAME = 300
_LEAST_LOUD = 8
"""If one line in as many has words of the rules, all lines of a chunk are looked up at once."""
_LOOKED_UP = 1024
"""As many at once: what is learned of some helps with the next."""
STDIN = Path("-")


def analyze_files(paths: Sequence[Path], world: int | None = None) -> LogAnalysis:
    """The analysis of all files; what could not be read is in its notes."""
    rules = shipped()
    analysis, shapes = LogAnalysis(rules, world), Shapes(rules.words)
    for path in paths:
        number, name = len(analysis.names), _shown(path)
        analysis.names.append(name)
        try:
            _read(path, name, of_file(number, path), analysis, shapes)
        except OSError as error:
            _note_unread(analysis, f"{name} cannot be read: {error.strerror or error}", name)
        except (EOFError, zlib.error):
            note = f"{name} is cut short or damaged (gzip): read up to there"
            _note_unread(analysis, note, f"the end of {name}")
    return analysis


def take_stream(stream: BinaryIO, origin: Origin, analysis: LogAnalysis, rules: LogRules) -> None:
    """Read what is not a file into an analysis."""
    shapes = Shapes(rules.words)
    _take(LogFile(stream, shapes), None, origin, analysis, shapes)


def _shown(path: Path) -> str:
    name = str(path)
    return name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"


def _read(path: Path, name: str, origin: Origin, analysis: LogAnalysis, shapes: Shapes) -> None:
    if path == STDIN:
        log = LogFile(sys.stdin.buffer, shapes)
        _take(log, path, origin, analysis, shapes)
        _note_noise(analysis, log, name)
        return
    if path.is_dir():
        _note_unread(analysis, f"{name} is a folder: name the files in it", name)
        return
    if not path.is_file():
        is_there = path.exists() or path.is_symlink()
        why = "is not a file" if is_there else "does not exist"
        _note_unread(analysis, f"{name} {why}", name)
        return
    with open_regular(path) as raw:
        start = raw.read(_START_BYTES)
        for magic, kind in _COMPRESSED.items():
            if start.startswith(magic):
                note = f"{name} is compressed ({kind}): unpack it first"
                _note_unread(analysis, note, name)
                return
        raw.seek(0)
        before = analysis.bytes
        log = LogFile(_opened(raw, start), shapes)
        _take(log, path, origin, analysis, shapes)
        if analysis.bytes == before:
            analysis.notes.append(f"{name} is empty")
        _note_noise(analysis, log, name)


def _note_unread(analysis: LogAnalysis, note: str, part: str) -> None:
    """Note a part that was not read: nothing can be known of failures there."""
    analysis.notes.append(note)
    analysis.unread.append(part)


def _note_noise(analysis: LogAnalysis, log: LogFile, name: str) -> None:
    if not log.is_mostly_text:
        _note_unread(analysis, f"most of {name} is not text", f"a readable copy of {name}")
    elif not log.has_readable_end:
        _note_unread(analysis, f"the end of {name} is not text", f"the end of {name}")


def _opened(raw: BinaryIO, start: bytes) -> BinaryIO:
    """The file as UTF-8 and unpacked, where its first bytes say that it is something else."""
    if start.startswith(_GZIP):
        return cast("BinaryIO", _Gzip(raw))
    for mark, zeros, encoding in _WIDE:
        if start.startswith(mark) and 2 * start[zeros].count(0) > len(start[zeros]):
            raw.seek(len(mark))
            return cast("BinaryIO", codecs.EncodedFile(raw, "utf-8", encoding, "replace"))
    return cast("BinaryIO", _Sparse(raw))


class _Gzip:
    """What a gzip file holds, in pieces of bounded size; all of it that a damaged one holds."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._unpacker = zlib.decompressobj(_GZIP_WINDOW)
        self._packed = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end. Raises EOFError where the file ends too early."""
        while True:
            self._packed = self._packed or self._raw.read(size)
            if not self._packed:
                if self._unpacker.eof:
                    return b""
                raise EOFError
            if self._unpacker.eof:
                self._unpacker = zlib.decompressobj(_GZIP_WINDOW)
            content = self._unpacker.decompress(self._packed, size)
            self._packed = self._unpacker.unconsumed_tail or self._unpacker.unused_data
            if content:
                return content


class _Sparse:
    """A file without its holes."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end."""
        block = self._raw.read(size)
        if len(block) == size and not block.strip(b"\0"):
            try:
                self._raw.seek(self._raw.tell(), os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing more but a hole
                    self._raw.seek(0, os.SEEK_END)
        return block


class _Reader:
    """Reads the lines of a file that can mean anything."""

    def __init__(self, log: LogFile, analysis: LogAnalysis, shapes: Shapes) -> None:
        self._log, self._analysis, self._shapes = log, analysis, shapes
        self._rules = analysis.rules
        self._silenced: set[Shape] = set()
        """The shapes that became quiet in the chunk."""
        self._lines: list[FileLine | None] = []
        """What is known of the first lines of the chunk, and an end."""
        self._steps: set[int] = set()
        self._wanted = self._loud = self._noted = [0]
        """The lines that are wanted outside of tracebacks, without and with steps, and the end."""
        self._where = 0

    def read_chunk(self) -> None:
        """Read the lines of a chunk."""
        log, analysis, end = self._log, self._analysis, len(self._log.contents)
        analysis.begin_chunk(log.contents, log.numbers)
        are_many = _LEAST_LOUD * len(log.loud) >= end
        self._lines = [None] if are_many else [None] * (end + 1)
        self._silenced.clear()
        self._steps = {*(filter(log.counts, log.steps) if are_many else log.steps)}
        self._loud = self._noted = [*log.loud, end]
        if self._steps:
            self._noted = sorted({*self._loud, *self._steps})
        self._wanted, self._where = self._loud, 0
        at = 0
        while True:
            if not analysis.open:
                at = self._next(at)
            if at == end:
                return
            if (at in self._steps or self._silenced) and self._is_passed_over(at):
                at += 1
            else:
                at += self._read(at)

    def _next(self, at: int) -> int:
        """The next line from an index on that is wanted outside of tracebacks."""
        if self._steps and self._analysis.attempts.wants_steps != (self._wanted is self._noted):
            self._wanted = self._loud if self._wanted is self._noted else self._noted
            self._where = bisect_left(self._wanted, at)
        wanted, where = self._wanted, self._where
        while wanted[where] < at:
            where += 1
        self._where = where
        return wanted[where]

    def _read(self, at: int) -> int:
        """Read a line, or all lines of a traceback that came before; how many these are."""
        log, analysis, lines = self._log, self._analysis, self._lines
        while at >= len(lines) - 1:
            part = log.contents[len(lines) - 1 : len(lines) - 1 + _LOOKED_UP]
            lines[-1:] = [*analysis.lines_of(part), None]
        line = lines[at]
        if line is None:
            self._take(at)
        elif (
            line.following
            and (again := analysis.find_again(lines, at)) is not None
            and self._steps.isdisjoint(range(at, at + again.size))
        ):
            analysis.add_again(again, lines, at)
            return again.size
        elif not analysis.add(line, at, log.contents[at]):
            self._silence(at, log.contents[at])
        elif at == analysis.ended and self._steps.isdisjoint(range(analysis.begun, at)):
            analysis.remember(lines)
        return 1

    def _is_passed_over(self, at: int) -> bool:
        """Whether a line is not read: because of its shape, or after its step was counted."""
        log, analysis = self._log, self._analysis
        shape = log.shapes[at]
        if shape in self._silenced:
            return not analysis.open
        if shape not in self._shapes.progress:
            return False
        if analysis.attempts.wants_steps and log.counts(at):
            analysis.add_step(text_of(log.contents[at]))
        return not analysis.open

    def _take(self, at: int) -> None:
        """Read a line that is not known."""
        for part in self._log.parts(at):
            if not self._analysis.add(self._analysis.line_of(part), at, part):
                self._silence(at, part)

    def _silence(self, at: int, content: bytes) -> None:
        """Pass over lines of this shape from now on, if none of them can mean anything."""
        shape = self._log.shapes[at]
        if shape in self._shapes.quiet or self._analysis.open:
            return
        if self._rules.is_settled(text_of(content)):
            self._shapes.silence(shape)
            self._silenced.add(shape)


def _take(
    log: LogFile, path: Path | None, origin: Origin, analysis: LogAnalysis, shapes: Shapes
) -> None:
    analysis.begin_file(origin, path, log.progress_before)
    reader = _Reader(log, analysis, shapes)
    try:
        for _ in log.chunks():
            reader.read_chunk()
    finally:
        analysis.end_file([*_decoded(log.progress)])
        analysis.tails.add(origin, *log.tail(analysis.tails.size))
        analysis.lines += log.lines
        analysis.bytes += log.bytes


def _decoded(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    return ((number, content.decode("utf-8", "replace")) for number, content in lines)
