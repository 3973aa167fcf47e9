"""What takes half a minute by design: teardowns that hang, a control plane that never answers."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep_services.agent.probes.settings import PROBED
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Pieces, Up

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
ENDS_WITHIN_S = 150.0
"""More than twice the longest wait that is by design."""


@pytest.fixture
def cluster(tmp_path: Path, job: str) -> Iterator[Cluster]:
    for name in ("up", job):
        (tmp_path / name).mkdir()
    up = Up(tmp_path / "up", **{**PATIENT, "EVERSTEP_HEALTH__HAILED_LIMIT_S": "20"})
    cluster = Cluster(tmp_path / job, job, up)
    try:
        up.start()
        yield cluster
    finally:
        cluster.close()
        up.stop()


HANGS = {
    "thread": "import threading\nthreading.Thread(target=time.sleep, args=(600,)).start()\n",
    "exit handler": "import atexit\natexit.register(time.sleep, 600)\n",
}


@pytest.mark.parametrize("how", sorted(HANGS))
def test_a_teardown_that_hangs_after_success_is_a_success(cluster: Cluster, how: str) -> None:
    """A line warns, and the job is done (A12.5)."""
    script = cluster.folder / "hangs.py"
    script.write_text(
        "import os, time\nfrom tests.e2e.scripts.stepping import Steps\nSteps().made_one()\n"
        f"if os.environ['RANK'] == '1':\n    {HANGS[how].replace(chr(10), chr(10) + '    ')}\n"
    )
    agent = cluster.run("--cold", "--nproc-per-node", "2", str(script))
    assert agent.wait(ENDS_WITHIN_S) == 0
    assert "rank 1 has not exited 30 s after its script had returned" in agent.said
    cluster.until_done()
    assert cluster.facts("incident_opened") == []


def test_a_bus_without_rendezvous_ends_with_94(tmp_path: Path, job: str) -> None:
    """One line has the reason; lines about checks, which a busy machine delays, are off."""
    for name in ("pieces", job):
        (tmp_path / name).mkdir()
    config = tmp_path / "everstep.toml"
    config.write_text("".join(f"[checks.probes.{name}]\nevery_s = 0\n" for name in PROBED))
    quiet = {"EVERSTEP_CONFIG": str(config), "EVERSTEP_LOG__LEVEL": "error"}
    pieces = Pieces(tmp_path / "pieces")
    cluster = Cluster(tmp_path / job, job, pieces)
    try:
        pieces.start()
        pieces.kill("rendezvous")
        began = time.monotonic()
        agent = cluster.steady(**quiet)
        assert agent.wait(ENDS_WITHIN_S) == 94
        assert time.monotonic() - began >= 60
        lines = agent.said.splitlines()
        assert len(lines) == 1, agent.said
        assert "rendezvous has not answered" in lines[0]
    finally:
        cluster.close()
        pieces.stop()


def test_a_lost_node_that_nobody_waits_for_is_found_all_the_same(cluster: Cluster) -> None:
    """Its ranks and the others' know nothing of each other: no error tells that it is gone."""
    script = cluster.folder / "alone.py"
    script.write_text(
        "import sys, time, pathlib\nfrom tests.e2e.scripts.stepping import Steps\n"
        "steps = Steps()\nwhile not pathlib.Path(sys.argv[1], 'end').exists():\n"
        "    steps.made_one()\n    time.sleep(0.02)\n"
    )
    agents = {
        node: cluster.run(
            *("--cold", "--nnodes", "2", "--spares", "1", "--stop-grace", "1"),
            *(str(script), str(cluster.folder)),
            node=node,
        )
        for node in ("node-1", "node-2", "node-3")
    }
    cluster.until_stepping(1)
    agents[cluster.members(1)[1]].kill_node()
    cluster.until_stepping(2, 120)
    (lost,) = cluster.facts("node_lost")
    assert "its connection to the bus closed after its last beat" in lost["reason"]
    cluster.finish()
    cluster.until_done()
