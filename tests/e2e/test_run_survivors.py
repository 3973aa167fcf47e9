"""Ranks that survive a round go on in the next one, and only what is lost is started."""

from collections.abc import Callable, Mapping
from pathlib import Path

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.e2e.operators import ask
from tests.waiting import until

LOST_AFTER = {
    "EVERSTEP_HEALTH__SILENCE_LIMIT_S": "8",
    "EVERSTEP_HEALTH__HAILED_LIMIT_S": "8",
}
"""These ranks wait for nobody: only silence tells that a node is lost."""
SURVIVOR = str(Path(__file__).parents[1] / "integration/warden/survivor.py")


def surviving(cluster: Cluster, *options: str, node: str = "node-1") -> Agent:
    return cluster.run("--cold", *options, SURVIVOR, str(cluster.folder), node=node)


def has(line: str) -> Callable[[str], bool]:
    return lambda said: line in said


def started(cluster: Cluster, number: int, count: int) -> Mapping[int, tuple[str, int]]:
    """How each rank of a round has begun, and in which process."""
    facts = cluster.until_facts(
        "rank_started", lambda found: sum(it["round"] == number for it in found) == count
    )
    return {it["rank"]: (it["start"], it["pid"]) for it in facts if it["round"] == number}


def test_the_ranks_beside_a_killed_one_go_on(cluster: Cluster) -> None:
    agent = surviving(cluster, "--nproc-per-node", "3")
    before = started(cluster, 1, 3)
    cluster.until_stepping(1)
    cluster.kill_rank(1, 1)
    cluster.until_stepping(2)
    now = started(cluster, 2, 3)
    assert {rank: now[rank] for rank in (0, 2)} == {
        rank: ("kept", before[rank][1]) for rank in (0, 2)
    }
    assert now[1][0] == "cold"
    assert cluster.facts("ranks_stopped") == []
    for rank in (0, 1, 2):
        line = f"node-1:{rank}| here in round 2"
        until(lambda: agent.said, "the console shows the new round", holds=has(line))
    cluster.finish()
    cluster.until_done()


def lose_a_node(cluster: Cluster) -> None:
    size = ("--nnodes", "2", "--nproc-per-node", "2", "--spares", "1")
    agents = {
        node: surviving(cluster, *size, "--infra-rank", str(place), node=node)
        for place, node in enumerate(("node-1", "node-2", "node-3"))
    }
    before = started(cluster, 1, 4)
    cluster.until_stepping(1)
    members = cluster.members(1)
    agents[members[1]].kill_node()
    cluster.until_stepping(2)
    now = started(cluster, 2, 4)
    assert now[0] == ("kept", before[0][1])
    assert now[1] == ("kept", before[1][1])
    assert (now[2][0], now[3][0]) == ("cold", "cold")
    assert cluster.members(2)[0] == members[0]
    cluster.finish()
    cluster.until_done()


def test_the_ranks_of_other_nodes_go_on_and_a_spare_gets_the_slot(
    tmp_path: Path, new_cluster: NewCluster, job: str
) -> None:
    with running_up(tmp_path / "up", **(PATIENT | LOST_AFTER)) as up:
        lose_a_node(new_cluster(up, job))


def test_a_person_who_restarts_gets_new_processes(cluster: Cluster) -> None:
    surviving(cluster, "--nproc-per-node", "2")
    cluster.until_stepping(1)
    ask(cluster, "restart", cluster.job, "--reason", "new processes")
    cluster.until_stepping(2)
    assert [start for start, _ in started(cluster, 2, 2).values()] == ["cold", "cold"]
    (stopped,) = cluster.facts("ranks_stopped")
    assert stopped["ranks"] == [0, 1]
    cluster.finish()
    cluster.until_done()
