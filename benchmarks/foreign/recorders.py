"""Flight recorders of trainings with injected faults: NVIDIA/nvidia-resiliency-ext, Apache-2.0."""

import json
import re
from pathlib import Path

from benchmarks.foreign import Answer, DataSet, Outcome
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.report import FlightReport

_PUBLISHED = "NVRx: 3 of 4"
_TRUTH = re.compile(r"^Fault ranks: (\[.*\])$", re.MULTILINE)
_NAMED = 0.5


def score(folder: Path) -> DataSet | None:
    """Analyze the dumps of each training, and compare the ranks it names with the culprits."""
    logs = sorted((folder / "recorders").glob("*/fault_injection.log"))
    if not logs:
        return None
    answers = [_answer(log) for log in logs]
    most = max(int(answer.answer) for answer in answers)
    return DataSet("recorders", answers, f"at most {most} faults", _PUBLISHED)


def reported(folder: Path) -> FlightReport:
    """The report about the dumps of a folder; their files' times tell nothing any more."""
    analysis = FlightAnalysis()
    for path in sorted(folder.glob("_dump_*")):
        analysis.add(read_dump(path.read_bytes(), int(path.name.rpartition("_")[2])))
    return analysis.report()


def named(report: FlightReport) -> set[int]:
    """The ranks that a report takes for culprits."""
    return {
        suspect.rank
        for fault in report.faults
        if fault.confidence >= _NAMED
        for suspect in fault.suspects
    }


def _answer(log: Path) -> Answer:
    match = _TRUTH.search(log.read_text())
    culprits = set(json.loads(match[1])) if match else set()
    report = reported(log.parent)
    ranks = named(report)
    outcome: Outcome = "right" if ranks == culprits else "wrong rank" if ranks else "silent"
    confidence = report.faults[0].confidence if report.faults else 0.0
    detail = f"{sorted(ranks)} instead of {sorted(culprits)}"
    return Answer(log.parent.name, outcome, confidence, detail, answer=str(len(report.faults)))
