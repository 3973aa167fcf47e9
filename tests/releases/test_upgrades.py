"""One release follows the other: over a record and a bus, and under a training."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import START_WITHIN_S, NewCluster
from tests.e2e.control_planes import PATIENT, SERVICES, Pieces, running_up
from tests.releases.conftest import VERSIONS, Releases
from tests.releases.test_mixtures import judged
from tests.waiting import until

HISTORY_FIRST = ("history", *(name for name in SERVICES if name != "history"))
"""The order of the guide."""


def test_a_record_and_a_bus_of_the_release_before_are_taken_over(
    releases: Releases, tmp_path: Path, new_cluster: NewCluster, job: str
) -> None:
    """What is on record stays, and the next job is added to it (A15.3)."""
    seen = {}
    for release in ("old", "new"):
        with running_up(tmp_path, **PATIENT, **releases[release]) as up:
            cluster = new_cluster(up, f"{job}-{release}")
            cluster.steady("--nproc-per-node", "2", **releases[release])
            cluster.until_all_step(2)
            cluster.kill_rank(1, 1)
            cluster.until_stepping(2)
            cluster.finish()
            cluster.until_done()
            assert judged(cluster, 1) == ["rank_exited"]
            status = until(
                lambda: cluster.api.get("status"),  # noqa: B023 - called here
                "the tables are whole",
                holds=lambda status: not status["is_rebuilding"],
            )
            assert status["version"] == VERSIONS[release]
            path = f"jobs/{job}-old"
            incidents = list(cluster.api.pages(f"{path}/incidents", {}, most=None))
            facts = cluster.api.pages("facts", {"job": f"{job}-old"}, most=None)
            seen[release] = {
                "state": cluster.api.get(path)["state"],
                "rounds": cluster.api.get(path)["rounds"],
                "causes": [each["cause"] for each in incidents],
                "facts": {each["id"] for each in facts},
            }
            assert up.process is not None
            up.process.terminate()
            assert up.process.wait() == 0
    assert seen["new"] == {**seen["old"], "facts": seen["new"]["facts"]}
    assert seen["new"]["facts"] >= seen["old"]["facts"]


@pytest.fixture
def pieces(releases: Releases, tmp_path: Path) -> Iterator[Pieces]:
    pieces = Pieces(tmp_path, **PATIENT, **releases["old"])
    try:
        pieces.start(START_WITHIN_S)
        yield pieces
    finally:
        pieces.stop()


def test_each_process_is_upgraded_under_a_training_with_kills(
    releases: Releases, pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    """After each upgrade of a service a rank is killed; then a new agent replaces an old one."""
    cluster = new_cluster(pieces, job)
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "100")
    for node in ("node-1", "node-2"):
        cluster.steady(*options, node=node, **releases["old"])
    cluster.until_all_step(2)
    cluster.steady(*options, node="node-3", **releases["new"])
    cluster.until_fact("node_joined", lambda body: body["node"] == "node-3")
    number = 1
    for name in HISTORY_FIRST:
        pieces.kill(name)
        pieces.become(**releases["new"])
        pieces.revive(name)
        cluster.kill_rank(number % 2, number)
        number += 1
        cluster.until_stepping(number)
    assert cluster.api.get("status")["version"] == VERSIONS["new"]
    cluster.agents[0].kill_node()
    number += 1
    cluster.until_stepping(number)
    assert set(cluster.members(number).values()) == {"node-2", "node-3"}
    cluster.finish()
    cluster.until_done()
    assert cluster.state()["rounds"] == number
    formed = [body["round"] for body in cluster.facts("round_formed")]
    assert formed == list(range(1, number + 1)), (
        "each kill has cost one round, and nothing else has"
    )
    assert {body["version"] for body in cluster.facts("node_joined")} == set(VERSIONS.values())
