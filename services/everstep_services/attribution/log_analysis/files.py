"""Files that people name, read one after the other into an analysis."""

from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from everstep_services.attribution.log_analysis.analysis import LogAnalysis
from everstep_services.attribution.log_analysis.chunks import LogFile, Shapes
from everstep_services.attribution.log_analysis.origins import Origin, of_file
from everstep_services.attribution.log_analysis.rules import Rules, shipped

_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bzip2", b"\xfd7zXZ": "xz"}
_MOST_CHARACTERS = 4096


def analyze_files(
    paths: Sequence[Path], world: int | None = None, rules: Rules | None = None
) -> LogAnalysis:
    """The analysis of all files; what could not be read is in its notes."""
    rules = rules or shipped()
    analysis, shapes = LogAnalysis(rules, world), Shapes(rules.words)
    for path in paths:
        number = len(analysis.names)
        analysis.names.append(str(path))
        try:
            _read(path, of_file(number, path), analysis, shapes, rules)
        except OSError as error:
            analysis.notes.append(f"{path} cannot be read: {error.strerror}")
    return analysis


def take_stream(stream: BinaryIO, origin: Origin, analysis: LogAnalysis, rules: Rules) -> None:
    """Read what is not a file into an analysis."""
    shapes = Shapes(rules.words)
    _take(LogFile(stream, shapes), origin, analysis, shapes, rules)


def _read(path: Path, origin: Origin, analysis: LogAnalysis, shapes: Shapes, rules: Rules) -> None:
    if not path.is_file():
        is_there = path.exists() or path.is_symlink()
        analysis.notes.append(f"{path} {'is not a file' if is_there else 'does not exist'}")
        return
    with path.open("rb", buffering=0) as raw:
        start = raw.read(5)
        for magic, name in _COMPRESSED.items():
            if start.startswith(magic):
                analysis.notes.append(f"{path} is compressed ({name}): unpack it first")
                return
        raw.seek(0)
        log = LogFile(raw, shapes)
        _take(log, origin, analysis, shapes, rules)
    if not log.bytes:
        analysis.notes.append(f"{path} is empty")
    if log.cut_lines:
        analysis.notes.append(f"{path}: {log.cut_lines} lines are too long to be read whole")


def _take(
    log: LogFile, origin: Origin, analysis: LogAnalysis, shapes: Shapes, rules: Rules
) -> None:
    for line in log.loud_lines():
        text = line.content[: 4 * _MOST_CHARACTERS].decode("utf-8", "replace").rstrip("\r")
        text = text.replace("\0", "")[:_MOST_CHARACTERS]
        means = analysis.add(origin, line.number, text)
        log.wants_all = analysis.has_open_traceback
        if not means and not log.wants_all and rules.is_settled(text):
            shapes.silence(line.shape)
    analysis.end_file()
    analysis.survived(origin.file, log.progress_line)
    analysis.lines += log.lines
    analysis.bytes += log.bytes
