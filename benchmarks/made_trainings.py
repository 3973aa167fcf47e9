"""Slow-downs and culprits of trainings made by plain arithmetic: how far off, how often right.

    python -m benchmarks.made_trainings [--seeds 40] [--kind KIND]

Trainings are those of `tests/fakes/training_traces.py`, written to a file and read, some seeds of
each kind. Error: of the total slow-down, against the same training with all ranks alike. Right: the
culprit, its cause and no other finding; nobody, where nobody is slow.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median

import pyarrow as arrow
from pyarrow import parquet

from everstep_services.straggler.domain.analysis import analyze
from everstep_services.straggler.domain.report import TraceReport
from everstep_services.straggler.traces import read_traces
from tests.fakes import training_traces as made
from tests.fakes.training_traces import MadeTraining


def reported(training: MadeTraining, path: Path) -> TraceReport:
    """The report about a training, from a file."""
    parquet.write_table(arrow.table(made.columns(training)), path)
    return analyze(read_traces([path]).table)


def mistakes(training: MadeTraining, report: TraceReport) -> Iterator[str]:
    """What of the report is not the truth, the total slow-down apart."""
    data = training.forward_s.shape[1]
    found = [(finding.cause, finding.ranks) for finding in report.findings]
    design = report.designs[0] if report.designs else None
    expected = {
        "slow rank": [("compute", (training.culprit,))],
        "slow link": [("network", (training.culprit, training.culprit + data))],
    }.get(training.kind, [])
    if found != expected:
        yield f"found {found} instead of {expected}"
    named = {"slow stage": "uneven stages", "uneven sequences": "sequence lengths"}
    if training.kind in named and (design is None or design.what != named[training.kind]):
        yield f"design {design} instead of {named[training.kind]}"
    if training.kind == "slow stage" and design and design.role != f"stage {training.culprit}":
        yield f"{design.role} instead of stage {training.culprit}"


def main() -> None:
    words = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    words.add_argument("--seeds", type=int, default=40)
    words.add_argument("--kind", choices=made.KINDS)
    asked = words.parse_args()
    head = ("n", "slow-down", "right", "findings", "median", "largest error")
    print(
        f"{'kind':<18}{head[0]:>4}{head[1]:>13}{head[2]:>7}{head[3]:>10}{head[4]:>9}{head[5]:>15}"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.parquet")
        for kind in [asked.kind] if asked.kind else made.KINDS:
            trainings = [made.made(kind, seed) for seed in range(asked.seeds)]
            reports = [reported(training, path) for training in trainings]
            pairs = list(zip(trainings, reports, strict=True))
            slow = [training.slowdown for training in trainings]
            errors = [
                abs((report.slowdown_ratio or 0.0) / truth - 1)
                for truth, report in zip(slow, reports, strict=True)
            ]
            right = mean(not [*mistakes(*pair)] for pair in pairs)
            findings = sum(len(report.findings) for report in reports)
            print(
                f"{kind:<18}{asked.seeds:>4}{min(slow):>7.2f}-{max(slow):<5.2f}{right:>7.0%}"
                f"{findings:>10}{median(errors):>9.2%}{max(errors):>15.2%}",
                flush=True,
            )


if __name__ == "__main__":
    main()
