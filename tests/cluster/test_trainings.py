"""A training on a cluster: servers are cut off, and ranks die meanwhile."""

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.servers import NAMES, Cluster
from tests.cluster.services import services_of
from tests.e2e.cluster import Cluster as Agents
from tests.waiting import until

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]
NODES = ("node-1", "node-2", "node-3")


class Pauses:
    """The longest time between two steps, as seen in the file of rank 0."""

    def __init__(self, steps: Path) -> None:
        self._steps = steps
        self._is_over = threading.Event()
        self.longest_s = 0.0

    def watch(self) -> None:
        seen, since = -1, time.monotonic()
        while not self._is_over.wait(0.005):
            made = self._steps.stat().st_mtime_ns
            if made != seen:
                seen, since = made, time.monotonic()
            self.longest_s = max(self.longest_s, time.monotonic() - since)

    @contextmanager
    def measured(self) -> Iterator["Pauses"]:
        thread = threading.Thread(target=self.watch)
        thread.start()
        try:
            yield self
        finally:
            self._is_over.set()
            thread.join()


def step_of(agents: Agents) -> int:
    saved = agents.folder / "step"
    return int(saved.read_text()) if saved.exists() else 0


def further(agents: Agents, steps: int) -> None:
    goal = step_of(agents) + steps
    until(lambda: step_of(agents), f"step {goal}", holds=lambda step: step >= goal)


@pytest.fixture
def agents(tmp_path: Path, job: str, cluster: Cluster) -> Iterator[Agents]:
    """An agent at each server, with two ranks each, and two replicas of the services.

    node-3 and one replica of each begin at the server that leads the rounds.
    """
    leader = cluster.leader("KV_ROUNDS")
    near, third = (name for name in NAMES if name != leader)
    with services_of(cluster, tmp_path) as services:
        services.start(third, (near, leader))
        folder = tmp_path / job
        folder.mkdir()
        agents = Agents(folder, job, services)
        try:
            for node, server in zip(NODES, (near, third, leader), strict=True):
                services.agents_at = server
                agents.steady("--nnodes", "3", "--nproc-per-node", "2", node=node)
            agents.until_stepping(1)
            further(agents, 50)
            yield agents
        finally:
            agents.close()


def second_rank_of(agents: Agents, node: str) -> int:
    (slot,) = (slot for slot, name in agents.members(1).items() if name == node)
    return 2 * slot + 1


def prove_judged(agents: Agents, killed: int | None) -> None:
    """The training ends well; the rank is the culprit, and no node."""
    agents.finish()
    agents.until_done()
    if killed is not None:
        verdict = until(
            lambda: agents.facts("verdict_reached")[-1:], "it is judged by all of its evidence",
            holds=lambda last: last and last[0].get("culprit_ranks") == [killed],
        )[0]  # fmt: skip
        assert verdict["kind"] == "killed"
        assert not verdict.get("culprit_nodes")
    assert len(agents.facts("round_formed")) == (1 if killed is None else 2)
    assert agents.facts("node_lost") == agents.facts("node_suspected") == []


@pytest.mark.parametrize("lasts_s", [5, 20, 60])
@pytest.mark.parametrize("dies_on", ["", "node-1", "node-3"])
def test_a_server_with_an_agent_and_replicas_is_cut_off(
    cluster: Cluster, agents: Agents, dies_on: str, lasts_s: float
) -> None:
    """Its agent and its replicas move to the other servers, and no healthy node is judged."""
    leader = cluster.leader("KV_ROUNDS")
    killed = second_rank_of(agents, dies_on) if dies_on else None
    pid = None if killed is None else agents.pid_of(killed, 1)
    with Pauses(agents.folder / "step").measured() as pauses:
        cluster.isolate(leader)
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
        time.sleep(lasts_s)
        cluster.heal()
        further(agents, 100)
    log.info("cut for %g s, death on %s: gap %.1f s", lasts_s, dies_on or "-", pauses.longest_s)
    prove_judged(agents, killed)


def test_a_rank_dies_in_the_moment_of_an_election(cluster: Cluster, agents: Agents) -> None:
    leader, killed = cluster.leader("KV_ROUNDS"), second_rank_of(agents, "node-1")
    pid, began = agents.pid_of(killed, 1), time.monotonic()
    with Pauses(agents.folder / "step").measured() as pauses:
        cluster.servers[leader].kill()
        os.kill(pid, signal.SIGKILL)
        until(lambda: cluster.leader("KV_ROUNDS"), "another leads", holds=leader.__ne__)
        election_s = time.monotonic() - began
        further(agents, 100)
    log.info("election %.1f s: gap %.1f s", election_s, pauses.longest_s)
    cluster.heal()
    prove_judged(agents, killed)
