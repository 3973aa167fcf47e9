"""Megatron's own re-run state machine under `everstep run`."""

import os

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.nvrx.wheels import megatron_core
from tests.e2e.processes import SCRIPTS

pytestmark = [pytest.mark.matrix, pytest.mark.timeout(700)]

_IMPORTS_S = 240.0
"""Each rank of two rounds imports all of Megatron."""


def training(cluster: Cluster, fault: str, megatron: pytest.TempPathFactory) -> list[int]:
    """Two ranks on two nodes; the exit codes of the agents."""
    options = ("--cold", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")
    folder = str(megatron_core(megatron.mktemp("megatron")))
    agents = [
        cluster.run(
            *(*options, "--infra-rank", str(place)),
            *(str(SCRIPTS / "megatron_rerun.py"), str(cluster.folder), fault),
            node=f"node-{place + 1}",
            PYTHONPATH=os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")])),
        )
        for place in range(2)
    ]
    cluster.until_fact("job_ended", within_s=_IMPORTS_S)
    return [agent.wait() for agent in agents]


@pytest.mark.parametrize(
    ("fault", "kind", "cause", "nodes"),
    [
        ("persistent", "persistent", "gpu", ["node-2"]),
        ("correct", "correct_but_unexpected", "user_code", []),
    ],
)
def test_a_result_that_comes_again_is_computed_on_another_node(
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    fault: str,
    kind: str,
    cause: str,
    nodes: list[str],
) -> None:
    assert training(cluster, fault, tmp_path_factory) == [93, 93]
    before, after = cluster.members(1), cluster.members(2)
    assert before == {0: "node-1", 1: "node-2"}
    assert not before.items() & after.items()
    assert [acted["action"] for acted in cluster.facts("numerics_acted")] == ["move"]
    (judged,) = cluster.until_facts("numerics_judged")
    assert (judged["kind"], judged["ranks"], judged["round"]) == (kind, [1], 2)
    assert judged["case"] == cluster.facts("numerics_suspected")[0]["case"]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["rounds"]) == ("stopped", 2)
    assert cluster.state()["restarts"] == 0
    verdict = cluster.until_fact(
        "verdict_reached",
        lambda body: body["incident"] == ended["incident"] and body["cause"] == cause,
    )
    assert verdict.get("culprit_nodes", []) == nodes


def test_a_result_that_does_not_come_again_stops_the_job(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert training(cluster, "transient", tmp_path_factory) == [93, 93]
    (judged,) = cluster.until_facts("numerics_judged")
    assert (judged["kind"], judged["node"], judged["round"]) == ("transient", "node-2", 1)
    assert judged["first"] > 300
    assert judged["again"] == [pytest.approx(1 / 3)]
    assert (cluster.folder / "rejected").read_text().count("node=node-2") == 2
