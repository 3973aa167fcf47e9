"""A real training with torch and gloo, forked from a warm process."""

import os
import signal
from pathlib import Path

import pytest

from everstep_services.cli import demonstration
from tests.e2e.cluster import Cluster
from tests.e2e.processes import below, until

TRAIN = Path(demonstration.__file__).with_name("train.py")


@pytest.mark.timeout(120)
def test_a_warm_training_survives_a_killed_rank_and_a_killed_forge(cluster: Cluster) -> None:
    agent = cluster.run("--nproc-per-node", "2", str(TRAIN), str(cluster.folder), "400")
    cluster.until_stepping(1, 60)
    assert cluster.facts("round_started")[0]["warm_ranks"] == 2
    forge = forge_of(agent.warden)
    os.kill(forge, signal.SIGKILL)
    until(lambda: forge_of(agent.warden, forge), "another forge is there")
    assert cluster.facts("round_ended") == [], "its death harms no rank"
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2)
    cluster.until_done()
    (incident,) = cluster.incidents()
    assert incident["rank"] == 1
    assert "going on from step" in agent.said


def forge_of(warden: int, but: int = 0) -> int:
    """The warden's child that leads no session of its own script; 0 when there is none."""
    for process in below(warden):
        if process.pid != but and process.ppid() == warden:
            command = process.cmdline()
            if "forge" in command:
                return process.pid
    return 0
