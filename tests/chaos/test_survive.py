"""Failures at drawn moments of trainings that survive: each ends as one that nobody disturbed.

`EVERSTEP_SURVIVE_SEEDS=1000:1200` chooses other seeds; the table is printed at the end.
"""

import os
from pathlib import Path

import pytest

from tests.chaos.survive_runs.runs import judged_runs, table, too_far_back
from tests.e2e.control_planes import PATIENT, running_up

SEEDS = os.environ.get("EVERSTEP_SURVIVE_SEEDS", "0:30")
SHARE = 0.95
"""Of single failures, after which no step is made again."""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]


def test_each_training_ends_as_if_nothing_had_failed(tmp_path: Path) -> None:
    first, _, end = SEEDS.partition(":")
    folder = tmp_path / "up"
    folder.mkdir()
    rows = []
    with running_up(folder, **PATIENT, EVERSTEP_HEALTH__NODES__STRIKES_LIMIT="1000") as up:
        for row in judged_runs(range(int(first), int(end)), up, tmp_path):
            rows.append(row)
            print(row, flush=True)
    print(f"\n{table(rows)}", flush=True)
    assert not [str(row) for row in rows if row.faults or too_far_back(row)]
    single = [row for row in rows if row.happened and row.is_single]
    assert sum(row.lost <= 0 for row in single) >= SHARE * len(single)
