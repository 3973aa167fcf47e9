"""Signals to an agent: passed on, with time to save; and what `everstep run` then exits with."""

import signal
import time

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.processes import SCRIPTS
from tests.waiting import until


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1", "SIGUSR2"])
def test_ranks_save_at_a_step_and_the_node_leaves_with_91(cluster: Cluster, name: str) -> None:
    """Each signal: handlers save, and data workers hear nothing (A12.1)."""
    script = (str(SCRIPTS / "saving.py"), str(cluster.folder))
    agent = cluster.run("--cold", "--nproc-per-node", "2", "--preempt-grace", "120", *script)
    cluster.until_stepping(1)
    agent.send(signal.Signals[name])
    assert agent.wait() == 91
    assert [(cluster.folder / f"saved-{rank}").read_text() for rank in (0, 1)] == [name] * 2
    assert not list(cluster.folder.glob("worker-*")), "a signal does not concern data workers"
    left = cluster.until_fact("node_left")
    assert (left["cause"], left["exit_code"]) == ("preempted", 91)
    ended = cluster.until_fact("allocation_ended")
    assert ended["state"] == "preempted"
    assert cluster.facts("job_ended") == []


def test_ranks_that_do_not_listen_are_killed_after_the_grace(cluster: Cluster) -> None:
    """The exit code is that of the signal (A12.1)."""
    script = (str(SCRIPTS / "deaf.py"), str(cluster.folder))
    agent = cluster.run("--cold", "--nproc-per-node", "2", "--preempt-grace", "1", *script)
    cluster.until_stepping(1)
    began = time.monotonic()
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began >= 1


def test_ranks_that_a_signal_ends_have_not_saved(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2", UNMODIFIED="1")
    cluster.until_stepping(1)
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM


def test_a_person_stops_it(cluster: Cluster) -> None:
    agent = cluster.steady("--nproc-per-node", "2")
    cluster.until_stepping(1)
    agent.send(signal.SIGINT)
    assert agent.wait() == 128 + signal.SIGINT


def test_a_person_who_insists_does_not_wait(cluster: Cluster) -> None:
    script = cluster.folder / "deaf.py"
    script.write_text(
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "from tests.e2e.scripts.stepping import Steps\nSteps().made_one()\nsignal.pause()\n"
    )
    agent = cluster.run("--cold", "--stop-grace", "600", str(script))
    cluster.until_stepping(1)
    agent.send(signal.SIGINT)
    until(lambda: "once more kills at once" in agent.said, "it has heard")
    agent.send(signal.SIGINT)
    assert agent.wait() == 128 + signal.SIGINT


def test_a_node_that_is_taken_away_is_replaced_and_costs_no_restart(cluster: Cluster) -> None:
    agents = {
        node: cluster.steady(
            *("--nnodes", "2", "--spares", "1", "--infra-rank", str(place)),
            node=node,
            UNMODIFIED="1",
        )
        for place, node in enumerate(("node-1", "node-2", "node-3"))
    }
    cluster.until_stepping(1)
    before = cluster.members(1)
    (spare,) = set(agents) - set(before.values())
    cluster.until_fact("node_joined", lambda body: body["node"] == spare)
    taken = agents.pop(before[1])
    taken.send(signal.SIGTERM)
    cluster.until_stepping(2)
    assert cluster.members(2) == {0: before[0], 1: spare}
    cluster.finish()
    assert [agent.wait() for agent in agents.values()] == [0, 0]
    assert taken.wait() == 128 + signal.SIGTERM
    # A rank of the other node may miss its peer before rendezvous has heard of the signal.
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["outcome"]) == ("preempted", "recovered")
    assert cluster.state()["restarts"] == 0
