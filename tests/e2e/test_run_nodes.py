"""Nodes and agents die, or are paused: a spare has the slot, and nobody else moves."""

import signal
from operator import not_

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import SCRIPTS, below
from tests.waiting import WITHIN_S, until


def three(cluster: Cluster) -> dict[str, Agent]:
    """Two slots of two ranks each, and a spare; they train when this returns."""
    agents = {
        node: cluster.steady(
            *("--nnodes", "2", "--nproc-per-node", "2", "--spares", "1"),
            *("--infra-rank", str(place), "--stop-grace", "1"),
            node=node,
        )
        for place, node in enumerate(("node-1", "node-2", "node-3"))
    }
    cluster.until_stepping(1)
    cluster.until_fact("node_joined", lambda body: body["node"] == standing_by(cluster, 1))
    return agents


def standing_by(cluster: Cluster, number: int) -> str:
    (spare,) = {"node-1", "node-2", "node-3"} - set(cluster.members(number).values())
    return spare


def test_the_first_agent_is_as_dispensable_as_any(cluster: Cluster) -> None:
    """Its node goes on without it for no longer than its warden needs (A2.1)."""
    agents = three(cluster)
    before, spare = cluster.members(1), standing_by(cluster, 1)
    first = agents[before[0]]
    ranks = [process.pid for process in below(first.pid)]
    first.kill()
    cluster.until_stepping(2)
    assert cluster.members(2) == {0: spare, 1: before[1]}
    until(lambda: set(ranks) & set(cluster.left()), "its ranks are gone", holds=not_)
    assert cluster.closed(1)[0]["ledger"]["wall_s"] < WITHIN_S
    cluster.finish()
    cluster.until_done()


def test_a_spare_that_was_never_needed_ends_well(cluster: Cluster) -> None:
    """The spare exits with 0 when the training is done (A2.2)."""
    agents = three(cluster)
    spare = standing_by(cluster, 1)
    cluster.finish()
    cluster.until_done()
    assert agents[spare].poll() == 0
    assert [one["node"] for one in cluster.facts("rank_started")].count(spare) == 0


def test_a_lost_spare_ends_no_round(cluster: Cluster) -> None:
    agents = three(cluster)
    agents[standing_by(cluster, 1)].kill_node()
    cluster.kill_rank(0, 1)
    cluster.until_stepping(2)
    assert cluster.members(2) == cluster.members(1)
    cluster.finish()
    cluster.until_done()
    assert len(cluster.incidents()) == 1


def test_a_paused_agent_changes_nothing_and_comes_back_as_a_spare(cluster: Cluster) -> None:
    """SIGSTOP for two rounds: the rounds go on, and it rejoins as a spare (A2.3)."""
    agents = three(cluster)
    before, spare = cluster.members(1), standing_by(cluster, 1)
    paused = agents[before[1]]
    paused.send(signal.SIGSTOP)
    cluster.kill_rank(0, 1)
    cluster.until_stepping(2)
    assert cluster.members(2) == {0: before[0], 1: spare}
    cluster.kill_rank(0, 2)
    cluster.until_stepping(3)
    paused.send(signal.SIGCONT)
    until(lambda: "round 1 is over" in paused.said, "it knows that its round is over")
    until(lambda: ranks_below(paused), "its ranks of round 1 are gone", holds=not_)
    assert len(cluster.facts("round_formed")) == 3
    agents[spare].kill_node()
    cluster.until_stepping(4)
    assert cluster.members(4) == before, "it was the spare, and has its slot again"
    cluster.finish()
    cluster.until_done()
    assert paused.poll() == 0


def ranks_below(agent: Agent) -> list[int]:
    return agent.children(str(SCRIPTS / "steady.py"))[1:]  # the agent's own command names it, too
