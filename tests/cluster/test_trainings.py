"""A training on a cluster: servers are cut off, and ranks die meanwhile."""

import logging
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.cluster.servers import NAMES, Cluster
from tests.cluster.trainings import NODES, Training, further, training
from tests.cluster.wall_clock import WallClock
from tests.waiting import until

log = logging.getLogger(__name__)
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(400)]


@pytest.fixture
def trained(tmp_path: Path, job: str, cluster: Cluster) -> Iterator[Training]:
    with training(cluster, tmp_path, job) as trained:
        yield trained


@pytest.mark.parametrize("lasts_s", [5, 20, 60])
@pytest.mark.parametrize("dies_on", ["", "node-1", "node-3"])
def test_a_server_with_an_agent_and_replicas_is_cut_off(
    cluster: Cluster, trained: Training, dies_on: str, lasts_s: float
) -> None:
    """Its agent and its replicas move to the other servers, and no healthy node is judged."""
    leader = cluster.leader("KV_ROUNDS")
    victim = trained.rank_of(dies_on) if dies_on else None
    with trained.pauses() as pauses:
        cluster.isolate(leader)
        if victim is not None:
            trained.kill(victim)
        time.sleep(lasts_s)
        healthy_s = trained.heal()
        trained.goes_on()
    trained.prove(f"cut for {lasts_s:g} s, death on {dies_on or '-'}", pauses, healthy_s)


def test_a_rank_dies_in_the_moment_of_an_election(cluster: Cluster, trained: Training) -> None:
    leader, victim = cluster.leader("KV_ROUNDS"), trained.rank_of("node-1")
    began = time.monotonic()
    with trained.pauses() as pauses:
        cluster.servers[leader].kill()
        trained.kill(victim)
        until(lambda: cluster.leader("KV_ROUNDS"), "another leads", holds=leader.__ne__)
        election_s = time.monotonic() - began
        trained.goes_on()
        healthy_s = trained.heal()
    trained.prove(f"election of {election_s:.1f} s and a death", pauses, healthy_s)


@pytest.mark.parametrize("what", ["server", "clients"])
def test_a_server_hangs_while_a_rank_dies(cluster: Cluster, trained: Training, what: str) -> None:
    """node-3, behind it, moves to another server; `clients`: only they do not reach it."""
    server, victim = cluster.servers[cluster.leader("KV_ROUNDS")], trained.rank_of("node-1")
    with trained.pauses() as pauses:
        if what == "server":
            server.stop()
        else:
            server.front.hang()
        trained.kill(victim)
        trained.goes_on()
    trained.prove(f"{what} of a server hang", pauses, trained.heal())


def test_servers_and_services_are_restarted_in_turn_while_ranks_die(
    cluster: Cluster, trained: Training
) -> None:
    """As a rolling upgrade does: each server, and then each replica of a service."""
    with trained.pauses() as of_servers:
        for server, node in zip(NAMES, NODES, strict=True):
            victim = trained.rank_of(node)
            cluster.servers[server].restart()
            trained.kill(victim)
            trained.goes_on()
            trained.heal()
    with trained.pauses() as of_services:
        for name in list(trained.services.processes):
            if name.startswith("rendezvous"):
                trained.kill(trained.rank_of("node-2"))
            trained.services.restart(name)
            trained.goes_on()
        healthy_s = trained.heal()
    log.info("servers restarted: gap %.1f s", of_servers.longest_s)
    trained.prove("services restarted", of_services, healthy_s)


@pytest.mark.parametrize("whose", ["services", "node-1", "all"])
def test_a_time_of_day_steps(cluster: Cluster, tmp_path: Path, job: str, whose: str) -> None:
    """An hour ahead, back, and an hour behind; a rank dies after each step."""
    clock, began = WallClock(tmp_path / "clock"), time.monotonic()
    with training(cluster, tmp_path, job, clock, whose) as trained:
        with trained.pauses() as pauses:
            for ahead_s in (3600, 0, -3600):
                clock.step_to(ahead_s)
                further(trained.agents, 50)
                trained.kill(trained.rank_of("node-1"))
                trained.goes_on()
            healthy_s = trained.heal()
        trained.prove(f"time of {whose} stepped", pauses, healthy_s)
        facts = trained.agents.api.pages("facts", {"job": job}, most=None)
        times = [datetime.fromisoformat(it["at"]) for it in facts]
        assert max(times) - min(times) > timedelta(hours=1.9), "it has stepped"
        ledgers = [it["ledger"]["wall_s"] for it in trained.agents.closed(3)]
        assert 0 < sum(ledgers) < time.monotonic() - began
