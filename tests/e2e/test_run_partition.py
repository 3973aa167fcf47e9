"""The network of a node is cut: no connection ends, and nobody gets a message."""

from collections.abc import Iterator
from functools import partial
from operator import not_
from pathlib import Path

import pytest

from tests.e2e.cluster import Agent, Body, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import Pieces
from tests.e2e.networks import Network
from tests.e2e.processes import SCRIPTS
from tests.variants import variant
from tests.waiting import until

NODES = ("node-1", "node-2", "node-3")
LOST_AFTER = {
    "EVERSTEP_HEALTH__SILENCE_LIMIT_S": "8",
    "EVERSTEP_HEALTH__HAILED_LIMIT_S": "8",
    "EVERSTEP_HEALTH__ALL_SILENT_LIMIT_S": "60",
}
"""Only silence tells that a node is cut off; but others may be silent for a while, too."""
WITHIN_S = 90.0


@pytest.fixture
def network(job: str) -> Iterator[Network]:
    try:
        entered = Network(job).__enter__()
    except OSError as error:
        pytest.skip(f"namespaces of the network cannot be made here: {error}")
    try:
        yield entered
    finally:
        entered.__exit__()


@pytest.fixture
def cluster(
    network: Network, tmp_path: Path, new_cluster: NewCluster, job: str
) -> Iterator[Cluster]:
    """Its control plane is on the hub."""
    pieces = Pieces(tmp_path, host=network.address, **LOST_AFTER)
    try:
        pieces.start()
        yield new_cluster(pieces, job)
    finally:
        pieces.stop()


def three(cluster: Cluster, network: Network) -> dict[str, Agent]:
    """Two slots of two ranks each, and a spare, on a host each; they train when this returns."""
    agents = {}
    for place, node in enumerate(NODES):
        address = network.add(node)
        with network.on(node):
            agents[node] = cluster.steady(
                *("--nnodes", "2", "--nproc-per-node", "2", "--spares", "1", "--stop-grace", "1"),
                *("--infra-rank", str(place), "--address", address),
                node=node,
            )
    cluster.until_stepping(1)
    for node in NODES:
        cluster.until_fact("node_joined", partial(is_about, node))
    return agents


def is_about(node: str, body: Body) -> bool:
    return bool(body["node"] == node)


def ranks_of(agent: Agent) -> list[int]:
    return agent.children(str(SCRIPTS / "steady.py"))[1:]  # the agent's own command names it, too


@pytest.mark.timeout(400)
@pytest.mark.parametrize("slot", [0, variant(1)])
def test_a_spare_takes_the_slot_of_a_node_whose_network_is_cut(
    cluster: Cluster, network: Network, slot: int
) -> None:
    agents = three(cluster, network)
    before = cluster.members(1)
    (spare,) = set(NODES) - set(before.values())
    lost, other = before[slot], before[1 - slot]
    network.cut(lost)
    cluster.until_stepping(2, WITHIN_S)
    assert cluster.members(2) == {slot: spare, 1 - slot: other}
    (incident,) = cluster.closed(1)
    assert incident["outcome"] == "recovered"
    assert ranks_of(agents[lost]), "it cannot know that the round has ended"

    network.mend(lost)
    until(
        lambda: "round 1 is over" in agents[lost].said,
        "it knows that its round is over",
        within_s=WITHIN_S,
    )
    until(lambda: ranks_of(agents[lost]), "its ranks of round 1 are gone", holds=not_)
    agents[spare].kill_node()
    cluster.until_stepping(3)
    assert cluster.members(3) == before, "it was the spare, and has its slot again"
    cluster.finish()
    cluster.until_done()


ALONE = """
import os, pathlib, sys, time
from tests.e2e.scripts.stepping import Steps
folder = pathlib.Path(sys.argv[1])
steps = Steps()
while not (folder / "end").exists():
    steps.made_one()
    (folder / ("steps-" + os.environ["RANK"])).write_text(str(steps.made))
    time.sleep(0.02)
"""


@pytest.mark.chaos
@pytest.mark.timeout(300)
def test_a_node_that_is_only_cut_off_is_not_lost_while_others_make_steps(
    cluster: Cluster, network: Network
) -> None:
    """Nobody answers there, but its connection did not close: its ranks train on, as they may."""
    script = cluster.folder / "alone.py"
    script.write_text(ALONE)
    for node in NODES[:2]:
        address = network.add(node)
        with network.on(node):
            arguments = ("--nnodes", "2", "--address", address, str(script), str(cluster.folder))
            cluster.run("--cold", *arguments, node=node)
    cluster.until_stepping(1)
    further(cluster, 0, 10)
    network.cut(cluster.members(1)[1])
    for rank in (0, 1):
        further(cluster, rank, 1000)  # at 50 a second at most: longer than a closed one is given
    assert cluster.facts("node_lost") == []
    network.mend(cluster.members(1)[1])
    cluster.finish()
    cluster.until_done()
    assert cluster.incidents() == []


def further(cluster: Cluster, rank: int, steps: int) -> None:
    """A rank makes this number of further steps."""

    def made() -> int:
        return int((cluster.folder / f"steps-{rank}").read_text() or 0)

    goal = until(made, "it makes steps", despite=(FileNotFoundError,)) + steps
    until(made, f"step {goal}", holds=lambda step: step >= goal, within_s=120)
