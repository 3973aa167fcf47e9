"""Faults in what ranks compute, in trainings drawn from seeds, against what is true of them.

`EVERSTEP_NUMERICS_SEEDS=1000:1200` chooses other seeds; the tally is printed at the end.
"""

import os
from pathlib import Path

import pytest

from tests.chaos.numerics_runs.drawing import drawn
from tests.chaos.numerics_runs.runs import judged_runs
from tests.chaos.numerics_runs.tally import Row, shortfalls, table

SEEDS = os.environ.get("EVERSTEP_NUMERICS_SEEDS", "0:200")
FEW = (9, 23, 24, 32, 117, 2067)
"""Short trainings: HSDP, pipelines, DDP; how results vary; and what only an output shows."""


def rows_of(seeds: "range | tuple[int, ...]", folder: Path) -> list[Row]:
    rows = []
    for row in judged_runs(seeds, folder):
        rows.append(row)
        print(row, flush=True)
    print(f"\n{table(rows)}", flush=True)
    return rows


@pytest.mark.timeout(240)
def test_a_few_trainings_are_judged_rightly(tmp_path: Path) -> None:
    rows = rows_of(FEW, tmp_path)
    assert {drawn(seed).parallel for seed in FEW} == {"hsdp", "pipeline", "ddp"}
    assert not [str(row) for row in rows if row.faults]


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_faults_are_found_and_named_and_healthy_trainings_left_alone(tmp_path: Path) -> None:
    first, _, end = SEEDS.partition(":")
    rows = rows_of(range(int(first), int(end)), tmp_path)
    assert not shortfalls(rows), "\n".join(shortfalls(rows))
