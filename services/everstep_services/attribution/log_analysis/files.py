"""Files that people name, read one after the other into an analysis."""

import codecs
import errno
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from everstep.evidence.files import open_regular
from everstep_services.attribution.log_analysis.analysis import LogAnalysis
from everstep_services.attribution.log_analysis.chunks import (
    LONGEST_LINE,
    Line,
    LogFile,
    Shapes,
    text_of,
)
from everstep_services.attribution.log_analysis.line_keys import LineKeys
from everstep_services.attribution.log_analysis.origins import Origin, of_file
from everstep_services.attribution.log_analysis.repeats import OpenBlock, RepeatedBlocks
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
STDIN = Path("-")


def analyze_files(paths: Sequence[Path], world: int | None = None) -> LogAnalysis:
    """The analysis of all files; what could not be read is in its notes."""
    rules = shipped()
    analysis, shapes, keys = LogAnalysis(rules, world), Shapes(rules.words), LineKeys(rules)
    for path in paths:
        number, name = len(analysis.names), _shown(path)
        analysis.names.append(name)
        try:
            _read(path, name, of_file(number, path), analysis, shapes, rules, keys)
        except OSError as error:
            _note_unread(analysis, f"{name} cannot be read: {error.strerror or error}", name)
        except (EOFError, zlib.error):
            note = f"{name} is cut short or damaged (gzip): read up to there"
            _note_unread(analysis, note, f"the end of {name}")
    return analysis


def take_stream(stream: BinaryIO, origin: Origin, analysis: LogAnalysis, rules: LogRules) -> None:
    """Read what is not a file into an analysis."""
    shapes = Shapes(rules.words)
    _take(LogFile(stream, shapes, LineKeys(rules)), None, origin, analysis, shapes, rules)


def _shown(path: Path) -> str:
    name = str(path)
    return name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"


def _read(  # noqa: PLR0913
    path: Path,
    name: str,
    origin: Origin,
    analysis: LogAnalysis,
    shapes: Shapes,
    rules: LogRules,
    keys: LineKeys,
) -> None:
    if path == STDIN:
        log = LogFile(sys.stdin.buffer, shapes, keys)
        _take(log, path, origin, analysis, shapes, rules)
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
        log = LogFile(_opened(raw, start), shapes, keys)
        _take(log, path, origin, analysis, shapes, rules)
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


class _Repeats:
    """Passes over blocks of a file that were read before, and remembers those that are read."""

    def __init__(self, log: LogFile, analysis: LogAnalysis) -> None:
        self._log, self._analysis = log, analysis
        self._blocks = RepeatedBlocks()
        self._begin = self._chunk = 0
        """The index of the first line of a block, and its chunk."""

    def taken(self, at: int) -> int:
        """How many lines, from an index on, are those of a block that was read before."""
        log, analysis, blocks = self._log, self._analysis, self._blocks
        attempt = analysis.attempt
        block = blocks.find_run(log.keys, at)
        if block is None or not analysis.add_run(block, *log.part(at, len(block.lines))):
            block = blocks.find(log.keys, at, analysis.fits)
            if block is None:
                return 0
            part = log.part(at, len(block.lines))
            may_wait = block.is_failure and not block.is_unsaid
            is_run = may_wait and analysis.add_run(block, *part)
            if not is_run and not analysis.add_again(block, *part):
                return 0
        log.wants_steps = analysis.wants_steps
        if analysis.attempt is attempt:
            blocks.follow(block, log.keys, at, log.progress_at)
        else:  # it begins an attempt: no run can have it
            blocks.end_run()
        return len(block.lines)

    def begin(self) -> None:
        """Note that a line is about to be read."""
        self._blocks.end_run()
        self._analysis.at = self._log.at
        if not self._log.wants_all:
            self._begin, self._chunk = self._log.at, self._log.chunk
            self._analysis.open_block = OpenBlock()

    def end(self, line: Line) -> None:
        """Remember the block that ends with a line that was read."""
        log = self._log
        if not log.may_repeat or log.wants_all or log.chunk != self._chunk or line.is_progress:
            return
        begin, end = self._begin, log.at + 1
        if max(map(len, log.contents[begin:end])) > LONGEST_LINE:
            return  # of such a line only parts are read
        if block := self._analysis.open_block.closed(log.keys[begin:end], begin):
            self._blocks.add(block)


def _take(
    log: LogFile,
    path: Path | None,
    origin: Origin,
    analysis: LogAnalysis,
    shapes: Shapes,
    rules: LogRules,
) -> None:
    analysis.begin_file(origin, path, log.progress_before)
    repeats = _Repeats(log, analysis)
    try:
        for line in log.loud_lines(repeats.taken):
            repeats.begin()
            _take_line(log, line, origin, analysis, shapes, rules)
            repeats.end(line)
    finally:
        analysis.end_file()
        analysis.add_progress(origin, [*_decoded(log.progress)])
        analysis.tails.add(origin, *log.tail(analysis.tails.size))
        analysis.lines += log.lines
        analysis.bytes += log.bytes


def _take_line(
    log: LogFile, line: Line, origin: Origin, analysis: LogAnalysis, shapes: Shapes, rules: LogRules
) -> None:
    text = text_of(line.content)
    if line.is_progress and log.wants_steps:
        analysis.add_step(origin, text)
        log.wants_steps = analysis.wants_steps
        if not log.wants_all:
            return
    means = analysis.add(origin, line.number, text)
    log.wants_all = analysis.has_open_traceback
    log.wants_steps = analysis.wants_steps
    if not means and not log.wants_all and rules.is_settled(text):
        shapes.silence(line.shape)


def _decoded(lines: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, str]]:
    return ((number, content.decode("utf-8", "replace")) for number, content in lines)
