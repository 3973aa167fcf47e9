"""Logs of trainings that failed, and what the analyzer makes of them."""

from pathlib import Path
from typing import Any

import pytest

from everstep_services.attribution.log_analysis.analysis import LogAnalysis
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.repeats import RepeatedBlocks
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


def both(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LogReport, LogReport, float]:
    """The answers with and without a look for repeats, and the share of lines passed over."""
    read: list[Any] = []
    add = LogAnalysis.add

    def counted(*line: Any) -> bool:
        read.append(line)
        return add(*line)

    monkeypatch.setattr(LogAnalysis, "add", counted)
    fast = analyze_files([path]).report()
    of_fast = len(read)
    with monkeypatch.context() as patch:
        patch.setattr(RepeatedBlocks, "find", lambda *_: None)
        slow = analyze_files([path]).report()
    monkeypatch.setattr(LogAnalysis, "add", add)
    return fast, slow, 1 - of_fast / max(1, len(read) - of_fast)
