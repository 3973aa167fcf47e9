"""Agents that wait for a round measure the network between them when somebody asks."""

from functools import partial

from tests.e2e.cluster import Body, Cluster
from tests.e2e.operators import ask


def is_about(node: str, body: Body) -> bool:
    return bool(body["node"] == node)


def test_nodes_without_ranks_measure_each_other_and_the_figures_are_printed(
    cluster: Cluster,
) -> None:
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "3", "--nproc-per-node", "1", node=node)
    for node in ("node-1", "node-2"):
        cluster.until_fact("node_joined", partial(is_about, node))
    found = ask(cluster, "network", cluster.job, "--reason", "all-reduce is slow")
    assert (found["schema"], found["slow"], found["untold"]) == (
        "everstep.network_test/v1",
        [],
        {},
    )
    (link,) = found["links"]
    assert {link["from"], link["to"]} == {"node-1", "node-2"}
    assert link["mib_s"] > 1
    act = cluster.until_fact("operator_acted")
    assert (act["action"], act["reason"]) == ("measure_network", "all-reduce is slow")
    cluster.steady("--nnodes", "3", "--nproc-per-node", "1", node="node-3")
    cluster.until_stepping(1)
    cluster.finish()
    cluster.until_done()
