"""Logs of trainings that failed, and what the analyzer makes of them."""

from pathlib import Path

from everstep_services.attribution.log_analysis.files import analyze_files
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
