"""Logs of trainings that failed, and what the analyzer makes of them."""

import sys
from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis import line_templates
from everstep_services.attribution.log_analysis.file_lines import FileLine, TracebackMemory
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.line_analysis import LineAnalysis
from everstep_services.attribution.log_analysis.report import LogReport


def written(folder: Path, **files: str) -> LogReport:
    paths = []
    for name, content in files.items():
        paths.append(folder / f"{name.replace('_', '-')}.log")
        paths[-1].write_text(content)
    return analyze_files(paths).report()


def raised(last: str, prefix: str = "") -> str:
    texts = [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 9, in step',
        "    x = y[3]",
        last,
    ]
    return "".join(f"{prefix}{text}\n" for text in texts)


def read_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learn nothing from the lines that were read."""
    monkeypatch.setattr(line_templates, "_LEAST_ALIKE", sys.maxsize)
    monkeypatch.setattr(TracebackMemory, "find", lambda *_: None)


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LogReport, LogReport, float]:
    """The answers with and without what earlier lines teach, and the share of lines it saves."""
    read: list[FileLine] = []
    line_of = LineAnalysis.line_of

    def counted(analysis: LineAnalysis, content: bytes) -> FileLine:
        line = line_of(analysis, content)
        read.extend([line] * (not line.meaning.is_shared))
        return line

    with monkeypatch.context() as patch:
        patch.setattr(LineAnalysis, "line_of", counted)
        fast = analyze_files([path]).report()
        of_fast = len(read)
        read_everything(patch)
        slow = analyze_files([path]).report()
    return fast, slow, 1 - of_fast / max(1, len(read) - of_fast)
