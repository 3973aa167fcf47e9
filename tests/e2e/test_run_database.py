"""PostgreSQL goes away while a job trains and facts flow: nothing is lost, and nothing stops."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.messages import Fact
from everstep.messages.codec import decode
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, Pieces
from tests.e2e.postgres import Postgres
from tests.e2e.test_run_control_plane import further
from tests.waiting import until


@pytest.fixture
def pieces(tmp_path: Path, postgres: Postgres) -> Iterator[Pieces]:
    """A control plane whose history is in PostgreSQL."""
    pieces = Pieces(tmp_path, **PATIENT, EVERSTEP_HISTORY__DATABASE_URL=postgres.url)
    try:
        pieces.start()
        yield pieces
    finally:
        pieces.stop()


@pytest.fixture
def cluster(new_cluster: NewCluster, pieces: Pieces, job: str) -> Cluster:
    return new_cluster(pieces, job)


@pytest.mark.timeout(180)
def test_it_is_killed_under_a_training_and_nothing_is_lost(
    cluster: Cluster, pieces: Pieces, postgres: Postgres
) -> None:
    """A rank fails meanwhile, and the database has each fact once (A15.1)."""
    agents = [cluster.steady("--nnodes", "2", node=node) for node in ("node-1", "node-2")]
    cluster.until_stepping(1)
    pid = cluster.pid_of(0, 1)
    history = pieces.processes["history"].pid

    postgres.kill()
    further(cluster, 50)
    os.kill(pid, signal.SIGKILL)
    until(lambda: all("round 2: " in agent.said for agent in agents), "round 2 forms")
    further(cluster, 50)
    postgres.revive()

    cluster.until_stepping(2)
    further(cluster, 25)
    cluster.finish()
    cluster.until_done()
    assert [one["trigger"] for one in cluster.incidents()] == ["rank_exited"]
    assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    assert cluster.facts("node_lost") == []
    assert pieces.processes["history"].poll() is None, "it has waited, and did not start anew"
    assert pieces.processes["history"].pid == history
    until(
        lambda: (ids_in_history(cluster), asyncio.run(ids_in_stream(cluster, pieces))),
        "history has each fact of the stream, and once",
        holds=lambda ids: ids[0] == ids[1],
    )


def ids_in_history(cluster: Cluster) -> list[str]:
    facts = cluster.api.pages("facts", {"job": cluster.job}, most=None)
    return sorted(fact["id"] for fact in facts)


async def ids_in_stream(cluster: Cluster, pieces: Pieces) -> list[str]:
    login = pieces._as(SERVICE)
    settings = BusSettings(
        url=login["EVERSTEP_BUS__URL"],
        credentials_file=Path(login["EVERSTEP_BUS__CREDENTIALS_FILE"]),
    )
    found: list[str] = []
    async with connect(settings, "test") as bus, bus.facts(None) as reader:
        while batch := (await reader.fetch(1000, 0.5)).facts:
            facts = [decode(sent.data) for sent in batch]
            found += [one.id for one in facts if isinstance(one, Fact) and one.job == cluster.job]
    return sorted(found)
