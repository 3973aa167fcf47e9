"""What follows from judged results, with agents and services: nodes leave, ranks move, jobs stop.

The nodes of each job have names of their own, for health counts strikes over all jobs.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from everstep.subjects import CLUSTER
from everstep_services.cli.errors import Exit
from tests.e2e import failure_logs
from tests.e2e.cluster import Agent, Body, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.e2e.operators import command, operator
from tests.e2e.processes import SCRIPTS

WITHIN_S = 240.0
"""Ranks import torch, and several agents start."""

pytestmark = [pytest.mark.variant, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def strict_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Services with the strikes that nodes have by default."""
    folder = tmp_path_factory.mktemp("strict-up")
    with failure_logs.shared("strict_up", folder), running_up(folder, **PATIENT) as up:
        yield up


@pytest.fixture
def cluster(new_cluster: NewCluster, strict_up: Up, job: str) -> Cluster:
    return new_cluster(strict_up, job)


class Training:
    """One rank on each node; the second node computes wrongly while it is told to."""

    def __init__(self, cluster: Cluster, nodes: int, *, spares: int = 0, **choices: Any) -> None:
        self.cluster = cluster
        self.nodes = [f"{cluster.job}-{number + 1}" for number in range(nodes)]
        given = {"node": self.nodes[1], "is_once": False, "is_alone": False, **choices}
        self._options = (
            *("--nnodes", str(nodes - spares), "--spares", str(spares)),
            *("--nproc-per-node", "1", "--max-restarts", "0", "--limit", "step=600"),
        )
        self._script = (str(SCRIPTS / "wrong_node.py"), str(cluster.folder), json.dumps(given))
        self.agents = [self.start(place) for place in range(nodes - spares)]
        cluster.until_stepping(1, WITHIN_S)
        self.agents += [self.start(place) for place in range(nodes - spares, nodes)]
        cluster.until_facts("node_joined", lambda joined: len(joined) == nodes)

    def start(self, place: int) -> Agent:
        """Start an agent of the job."""
        options = (*self._options, "--infra-rank", str(place))
        return self.cluster.run(*options, *self._script, node=self.nodes[place])

    def harm(self) -> Body:
        """Compute wrongly from now on; returns the judgement."""
        (self.cluster.folder / "wrong").touch()
        return self.cluster.until_fact("numerics_judged", within_s=WITHIN_S)

    def until_round(self, number: int) -> list[str]:
        """The nodes of a round, by slot, once it steps."""
        self.cluster.until_stepping(number, WITHIN_S)
        members = self.cluster.members(number)
        return [members[slot] for slot in sorted(members)]

    def told(self) -> str:
        """What `everstep why` tells of the job."""
        environ = operator(self.cluster.plane, self.cluster.folder)
        done = command(environ, "why", self.cluster.job, "--api", self.cluster.plane.api)
        assert done.returncode == Exit.OK, done.stderr
        return done.stdout


def has(count: int) -> Callable[[list[Body]], bool]:
    return lambda bodies: len(bodies) == count


def of_health(cluster: Cluster, kind: str, node: str) -> Body:
    """A fact about a node, which is of no job."""
    health = Cluster(cluster.folder, CLUSTER, cluster.plane)
    try:
        return health.until_fact(kind, lambda body: body["node"] == node)
    finally:
        health.close()


def test_a_node_that_computes_wrongly_each_time_leaves_for_the_spare(cluster: Cluster) -> None:
    training = Training(cluster, 3, spares=1, persistent="exclude")
    bad = training.nodes[1]
    result = training.harm()
    assert (result["kind"], result["ranks"], result["node"]) == ("persistent", [1], bad)
    assert training.agents[1].wait(WITHIN_S) == 0
    assert training.until_round(2) == [training.nodes[0], training.nodes[2]]
    assert cluster.state()["restarts"] == 0
    restored = cluster.until_facts("checkpoint_restored")
    assert all(body["step"] < result["step"] for body in restored)
    incident = cluster.own_incident()
    assert (incident["trigger"], incident["outcome"], incident["node"]) == (
        "numerics", "recovered", bad,
    )  # fmt: skip
    verdict = cluster.until_fact(
        "verdict_reached", lambda it: it["incident"] == incident["incident"]
    )
    assert (verdict["cause"], verdict["kind"], verdict["culprit_nodes"]) == (
        "host", "silent_corruption", [bad],
    )  # fmt: skip
    assert of_health(cluster, "node_suspected", bad)["strikes"] == 1
    assert "The training asked that its node leaves" in training.told()
    cluster.finish()
    cluster.until_done()


@pytest.mark.parametrize("nodes", [2, 3])
def test_ranks_move_where_only_another_device_can_tell(cluster: Cluster, nodes: int) -> None:
    """With a spare, the node that computes wrongly is left out; without, it has another rank.

    There the step is made again, so that the first node is named.
    """
    training = Training(cluster, nodes, spares=nodes - 2, is_alone=True, elsewhere="move")
    assert training.harm()["kind"] == "correct_but_unexpected"
    (cluster.folder / "wrong").unlink()
    after = training.until_round(2)
    assert after == ([training.nodes[1], training.nodes[0]] if nodes == 2 else after)
    assert nodes == 2 or training.nodes[1] not in after
    assert cluster.state()["restarts"] == 0
    incident = cluster.own_incident()
    assert (incident["trigger"], incident["outcome"]) == ("numerics", "recovered")
    bad = training.nodes[1]
    first, second = cluster.until_facts("numerics_judged", has(2))
    assert (second["kind"], second["ranks"], second["node"]) == ("persistent", [1], bad)
    assert (second["case"], second["moved_from"]) == (first["case"], 1)
    verdict = cluster.until_fact(
        "verdict_reached",
        lambda it: (it["incident"], it["kind"]) == (incident["incident"], "silent_corruption"),
    )
    assert (verdict["cause"], verdict["culprit_nodes"]) == ("host", [bad])
    assert of_health(cluster, "node_suspected", bad)["strikes"] == 1
    assert f"rank 1 had loss nan on {bad}, and has" in training.told()
    cluster.finish()
    cluster.until_done()


def test_a_result_that_is_the_same_on_other_nodes_is_not_a_device_s(cluster: Cluster) -> None:
    choices: dict[str, Any] = {"is_alone": True, "elsewhere": "move", "unexpected": "stop"}
    training = Training(cluster, 2, node="", **choices)
    training.harm()
    assert [agent.wait(WITHIN_S) for agent in training.agents] == [93, 93]
    judged = cluster.until_facts("numerics_judged", has(2))
    assert {it["kind"] for it in judged} == {"correct_but_unexpected"}
    assert "and has the same on" in judged[1]["reason"]
    assert [it["action"] for it in cluster.facts("numerics_acted")] == ["move", "stop"]


def test_a_job_that_stops_for_a_result_is_not_brought_back(cluster: Cluster) -> None:
    training = Training(cluster, 2, persistent="stop")
    training.harm()
    assert [agent.wait(WITHIN_S) for agent in training.agents] == [93, 93]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["exit_code"], ended["rounds"]) == ("stopped", 93, 1)
    assert cluster.own_incident()["outcome"] == "stopped"
    assert cluster.facts("action_decided")[0]["rule"] == "stop.asked"
    assert not [it for it in cluster.facts("action_decided") if it["action"] == "replace"]
    (cluster.folder / "wrong").unlink()
    again = [training.start(place) for place in range(2)]
    assert [agent.wait(WITHIN_S) for agent in again] == [93, 93], "a requeue is told to end"


def test_results_that_pass_again_and_again_make_the_node_suspect(cluster: Cluster) -> None:
    training = Training(cluster, 2, is_once=True)
    for count in range(1, 4):
        training.harm()
        judged = cluster.until_facts("numerics_judged", has(count))
        assert judged[-1]["kind"] == "transient"
        verdicts = cluster.until_facts("verdict_reached", has(count))
        assert verdicts[-1]["culprit_nodes"] == [training.nodes[1]]
    assert of_health(cluster, "node_suspected", training.nodes[1])["strikes"] == 3
    outcomes = [incident["outcome"] for incident in cluster.closed(3)]
    assert outcomes == ["recovered"] * 3
    cluster.finish()
    cluster.until_done()
