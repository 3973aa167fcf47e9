"""Traces of trainings, with the slow-down that their authors computed.

ByteDance-Seed/StragglerAnalysis, Apache-2.0. Right is a slow-down within 5 % of theirs, and slow
ranks where these explain at least half of it (their Mw), and none where they do not.
"""

from pathlib import Path

import msgspec

from benchmarks.foreign import Answer, DataSet, Outcome
from everstep_services.straggler.domain.analysis import analyze
from everstep_services.straggler.traces import read_traces

_CLOSE, _MOSTLY = 0.05, 0.5


def score(folder: Path) -> DataSet | None:
    """Analyze each trace, and compare its slow-down and its slow ranks with the truth."""
    results = sorted((folder / "traces").glob("result-*.json"))
    if not results:
        return None
    scored = [_answer(result) for result in results]
    ours, published = zip(*(figures for _, figures in scored), strict=True)
    texts = (
        f"slow-down {', '.join(f'{ratio:.3f}' for ratio in ratios)}" for ratios in (ours, published)
    )
    return DataSet("traces", [answer for answer, _ in scored], *texts)


def _answer(result: Path) -> tuple[Answer, tuple[float, float]]:
    name = result.stem.removeprefix("result-")
    truth = float(msgspec.json.decode(result.read_bytes())["blocking_slowdown"])
    workers = msgspec.json.decode(result.with_name(f"mw-{name}.json").read_bytes())
    is_slow = float(workers["Mw"]) >= _MOSTLY
    report = analyze(read_traces([result.with_name(f"trace-{name}.parquet")]).table)
    ratio = report.slowdown_ratio or 0.0
    is_right = abs(ratio / truth - 1) <= _CLOSE and bool(report.findings) == is_slow
    outcome: Outcome = "right" if is_right else "wrong"
    ranks = [finding.ranks for finding in report.findings]
    designs = ", ".join(design.what for design in report.designs)
    confidence = max((finding.confidence for finding in report.findings), default=1.0)
    detail = f"slow-down {ratio:.3f} instead of {truth:.3f}, slow ranks {ranks}, {designs}"
    return Answer(name, outcome, confidence, detail), (ratio, truth)
