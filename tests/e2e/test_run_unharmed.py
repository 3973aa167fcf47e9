"""No training ends, and none is restarted, for what only watches and records it (A2.4)."""

import os
import signal

import psutil

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import SCRIPTS, below, python
from tests.waiting import until


def rank_1(agent: Agent) -> int:
    """Its process, found without a word of the agent."""
    for process in below(agent.pid):
        try:
            if process.environ().get("RANK") == "1":
                pid: int = process.pid
                return pid
        except psutil.Error:
            continue
    return 0


def recovers_and_ends_well(cluster: Cluster, agent: Agent) -> None:
    """A rank is killed; the next round trains on, and the job ends as it should."""
    saved = cluster.folder / "step"
    until(saved.exists, "steps are made")
    os.kill(until(lambda: rank_1(agent), "rank 1 runs"), signal.SIGKILL)
    cluster.until_fact("round_formed", lambda body: body["round"] == 2)
    reached = int(saved.read_text())
    until(lambda: int(saved.read_text()), "more steps are made", holds=lambda at: at > reached + 3)
    cluster.finish()
    cluster.until_done()


def test_an_agent_in_which_all_watching_fails_trains_on(cluster: Cluster) -> None:
    broken = python(str(SCRIPTS / "broken_watching.py"))
    agent = cluster.steady("--nproc-per-node", "2", within=broken)
    recovers_and_ends_well(cluster, agent)
    assert "the ranks run on (RuntimeError: on purpose)" in agent.said


def test_an_agent_that_can_record_nothing_trains_on(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2", EVERSTEP_BUS__SPOOL_MAX_BYTES="1")
    recovers_and_ends_well(cluster, agent)
    assert not cluster.facts("rank_exited"), "there was room"


def test_an_agent_to_which_nobody_listens_trains_on(cluster: Cluster) -> None:
    deaf = ["bash", "-c", 'set -o pipefail; "$@" 2>&1 | head -n 1', "deaf"]
    agent = cluster.steady("--nproc-per-node", "2", within=deaf)
    recovers_and_ends_well(cluster, agent)
