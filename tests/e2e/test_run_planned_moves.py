"""Nodes come and go as planned: the ranks of the others keep their processes and their states."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.e2e.operators import ask
from tests.e2e.processes import SCRIPTS

GROWS = {"EVERSTEP_RENDEZVOUS__GROW_AFTER_S": "0.1"}
GLOBAL_BATCH = 12


@pytest.fixture
def growing(tmp_path: Path, new_cluster: NewCluster, job: str) -> Iterator[Cluster]:
    with running_up(tmp_path / "up", **(PATIENT | GROWS)) as up:
        yield new_cluster(up, job)


def sharing(cluster: Cluster, number: int, *options: str) -> Agent:
    script = (str(SCRIPTS / "sharing.py"), str(cluster.folder))
    return cluster.run(*options, "--infra-rank", str(number), *script, node=f"node-{number}")


def starts(cluster: Cluster, number: int, count: int) -> dict[str, str]:
    """How the rank of each node has begun in a round."""
    facts = cluster.until_facts(
        "rank_started", lambda found: sum(it["round"] == number for it in found) == count
    )
    return {it["node"]: it["start"] for it in facts if it["round"] == number}


def finish(cluster: Cluster, *leave: Agent) -> None:
    """All others end well, and each step was made once, with the same batch of new samples."""
    cluster.finish()
    stay = [agent for agent in cluster.agents if agent not in leave]
    assert [agent.wait() for agent in stay] == [0] * len(stay)
    samples: dict[int, list[str]] = defaultdict(list)
    for path in cluster.folder.glob("steps-*"):
        for line in path.read_text().splitlines():
            step, _, _, _, _, *own = line.split()
            samples[int(step)] += own
    assert sorted(samples) == list(range(1, max(samples) + 1))
    assert {len(each) for each in samples.values()} == {GLOBAL_BATCH}
    assert len({it for each in samples.values() for it in each}) == len(samples) * GLOBAL_BATCH
    assert len({path.read_text() for path in cluster.folder.glob("weights-*")}) == 1


def test_a_node_joins_and_the_ranks_of_the_others_go_on(growing: Cluster) -> None:
    for number in (1, 2):
        sharing(growing, number, "--nnodes", "2:3", "--nproc-per-node", "1")
    growing.until_stepping(1)
    sharing(growing, 3, "--nnodes", "2:3", "--nproc-per-node", "1")
    growing.until_stepping(2)
    begun = starts(growing, 2, 3)
    assert begun.pop("node-3") != "kept"
    assert begun == {"node-1": "kept", "node-2": "kept"}
    finish(growing)
    assert growing.incidents() == []


def test_a_spare_takes_the_slot_of_a_drained_node(cluster: Cluster) -> None:
    size = ("--nnodes", "2", "--nproc-per-node", "1", "--spares", "1")
    agents = [sharing(cluster, number, *size) for number in (1, 2, 3)]
    cluster.until_stepping(1)
    ask(cluster, "drain", "node-1", "--job", cluster.job, "--reason", "fan")
    cluster.until_stepping(2)
    begun = starts(cluster, 2, 2)
    assert begun.pop("node-3") != "kept"
    assert begun == {"node-2": "kept"}
    assert agents[0].wait() == 0
    finish(cluster, agents[0])
    assert cluster.incidents() == []
