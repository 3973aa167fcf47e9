"""Ranks of which only NCCL's recorder tells: a hang, its verdict, and a slow rank.

No NCCL runs here: a script answers in the shapes that torch's source gives its recorder.
"""

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import START_WITHIN_S, NewCluster
from tests.e2e.control_planes import Up
from tests.e2e.processes import SCRIPTS

pytestmark = [pytest.mark.variant, pytest.mark.timeout(400)]
WITHIN_S = 150.0
LIMIT_S = 20.0


@pytest.fixture
def cluster(new_cluster: NewCluster, quick_up: Up, job: str) -> Cluster:
    cluster = new_cluster(quick_up, job)
    for place in range(2):
        cluster.run(
            "--infra-rank", str(place), "--nnodes", "2", "--nproc-per-node", "2",
            "--limit", f"outside={LIMIT_S:g}", "--limit", "first-step=120",
            str(SCRIPTS / "nccl_shapes.py"), str(cluster.folder),
            node=f"node-{place + 1}", TORCH_FR_BUFFER_SIZE="0",
        )  # fmt: skip
    cluster.until_stepping(1, START_WITHIN_S)
    return cluster


def test_who_is_missing_in_a_collective_is_named_and_is_the_verdict(cluster: Cluster) -> None:
    (cluster.folder / "hang").touch()
    stall = cluster.until_fact("rank_stalled", within_s=WITHIN_S)
    assert stall["rank"] == 1
    assert "in forget_the_others" in stall["blocked_in"]
    verdict = cluster.until_fact(
        "verdict_reached", lambda body: not body.get("is_inconclusive"), within_s=WITHIN_S
    )
    assert verdict["culprit_ranks"] == [1]
    assert "all_reduce" in str(verdict), "the recorders of the ranks are evidence"
    cluster.until_stepping(2, START_WITHIN_S)
    (cluster.folder / "end").touch()
    cluster.until_done()
    waiting = [fact for fact in cluster.facts("rank_stalled") if fact["rank"] != 1]
    assert all("it is in the collective nccl:all_reduce" in fact["blocked_in"] for fact in waiting)


def test_a_slow_rank_is_named_by_durations_on_the_device(cluster: Cluster) -> None:
    fresh = cluster.folder / "fresh"
    fresh.write_text("2")
    fresh.rename(cluster.folder / "slow")
    found = cluster.until_fact("straggler_found", within_s=WITHIN_S)
    assert (found["rank"], found["node"]) == (2, "node-2")
    (cluster.folder / "end").touch()
    cluster.until_done()
