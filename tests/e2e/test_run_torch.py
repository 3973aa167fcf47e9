"""A real training with torch and gloo, forked from a warm process."""

import os
import re
import signal

import psutil
import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS, below
from tests.variants import variant
from tests.waiting import until

START_WITHIN_S = 180.0
"""Ranks import torch, each for itself where the start is cold."""
ENDS_WITHIN_S = 600


@pytest.mark.timeout(ENDS_WITHIN_S)
def test_a_warm_training_survives_a_killed_forge_and_a_killed_rank(cluster: Cluster) -> None:
    script = (str(SCRIPTS / "gloo.py"), str(cluster.folder))
    agent = cluster.run("--nproc-per-node", "2", *script)
    cluster.until_stepping(1, START_WITHIN_S)
    assert cluster.until_fact("round_started")["warm_ranks"] == 2
    (first,) = forges(agent.warden)
    os.kill(first, signal.SIGKILL)
    until(lambda: [pid for pid in forges(agent.warden) if pid != first], "there is another forge")
    assert cluster.facts("round_ended") == []
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2, START_WITHIN_S)
    cluster.finish()
    cluster.until_done()
    assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    (incident,) = cluster.incidents()
    assert (incident["rank"], incident["outcome"]) == (1, "recovered")


@pytest.mark.timeout(ENDS_WITHIN_S)
def test_the_rank_that_raised_is_named_though_it_left_its_group_first(cluster: Cluster) -> None:
    """Three ranks with gloo, and no decorator (A4.5)."""
    cluster.run("--nproc-per-node", "3", str(SCRIPTS / "gloo.py"), str(cluster.folder))
    for restart, rank in enumerate((1, 0)):
        cluster.until_stepping(restart + 1, START_WITHIN_S)
        (cluster.folder / f"raise-{restart}-{rank}").touch()
    cluster.until_stepping(3, START_WITHIN_S)
    incidents = cluster.closed(2)
    cluster.finish()
    cluster.until_done()
    assert [one["rank"] for one in incidents] == [1, 0], [one["story"] for one in incidents]


KILLS = 6


@pytest.mark.timeout(ENDS_WITHIN_S)
def test_the_console_names_the_killed_rank_and_not_its_victims(cluster: Cluster) -> None:
    """A4.5: whichever of them was heard first."""
    options = ("--nproc-per-node", "4", "--max-restarts", "none")
    agent = cluster.run(*options, str(SCRIPTS / "killed_gloo.py"), str(KILLS))
    assert agent.wait(START_WITHIN_S) == 0
    said = re.findall(r"^everstep: round (\d+) is over: (.*)$", agent.said, re.MULTILINE)
    killed = [(str(n), f"rank {n % 4} was ended by SIGKILL") for n in range(1, KILLS + 1)]
    assert said == killed


def forges(warden: int) -> list[int]:
    """The warden's children that still have the forge's command, and not a rank's."""
    found = []
    for process in below(warden):
        try:
            if process.ppid() == warden and "forge" in process.cmdline():
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


@pytest.mark.timeout(ENDS_WITHIN_S)
@pytest.mark.parametrize("way", [variant("reports"), "is silent"])
def test_the_first_step_of_a_round_has_the_number_of_the_script(cluster: Cluster, way: str) -> None:
    """The optimizer steps before the script counts: what a restart costs must be right (A4.1)."""
    agent = cluster.run("--cold", str(SCRIPTS / "resuming.py"), way)
    assert agent.wait(START_WITHIN_S) == 0
    cluster.until_fact("job_ended")
    cluster.until_stepping(2)
    firsts = [one["step"] for one in cluster.facts("progress_made") if one.get("is_first")]
    assert firsts == [1, 9]
    (closed,) = cluster.facts("incident_closed")
    assert closed.get("lost_steps") == 2
