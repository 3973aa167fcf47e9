"""Two hundred recoveries: nothing grows in the rank that survives them, its warden and its agent.

`EVERSTEP_SURVIVE_ROUNDS` chooses another number; what each recovery adds is printed.
"""

import json
import os
import statistics
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, running_up

ROUNDS = int(os.environ.get("EVERSTEP_SURVIVE_ROUNDS", "200"))
SCRIPT = str(Path(__file__).with_name("survive_runs") / "leaking.py")
MOST = {"descriptors": 0.02, "threads": 0.02, "shared": 0.02, "memory": 20_000}
"""What a recovery may add. Memory: an allocator's noise, and what an agent keeps of each round."""
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(3600)]


@pytest.mark.parametrize(("shape", "world"), [("ddp", 2), ("hsdp", 4)])
def test_recoveries_leave_nothing(shape: str, world: int, tmp_path: Path) -> None:
    for name in ("up", "job"):
        (tmp_path / name).mkdir()
    with running_up(tmp_path / "up", **PATIENT) as up:
        cluster = Cluster(tmp_path / "job", f"leaks-{shape}", up)
        try:
            options = ("--nproc-per-node", str(world), "--max-restarts", "none")
            agent = cluster.run(*options, SCRIPT, str(cluster.folder), shape, str(ROUNDS))
            assert agent.wait(3000) == 0, agent.said
        finally:
            cluster.close()
    lines = (tmp_path / "job/figures").read_text().splitlines()
    assert len(lines) == ROUNDS + 1
    figures = [json.loads(line) for line in lines[ROUNDS // 4 :]]
    grown = []
    for process, used in figures[0].items():
        for name in used:
            series = [each[process][name] for each in figures]
            slope = statistics.linear_regression(range(len(series)), series).slope
            print(f"{process} {name}: {series[0]} to {series[-1]}, {slope:+.3f} a recovery")
            grown += [f"{process} {name}: {slope}"] if slope > MOST[name] else []
    assert not grown
