"""Agents that wait for a round measure the network between them when somebody asks."""

import json
from functools import partial

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Body, Cluster
from tests.e2e.operators import command, operator
from tests.waiting import until

STOOD = (
    "did not answer within",
    "its turn was over before it could be called",
    "another test was still going on",
    "no process listens there",
)
"""Why a node was not measured that had no turn on its machine while it had one in the test."""


def is_about(node: str, body: Body) -> bool:
    return bool(body["node"] == node)


def measured(cluster: Cluster) -> Body | None:
    """The figures; None if a node stood for so long that its turn was over, and it is on record."""
    words = ("network", cluster.job, "--reason", "all-reduce is slow")
    environ = operator(cluster.plane, cluster.folder)
    done = command(environ, *words, "--api", cluster.plane.api, "-o", "json")
    found: Body = json.loads(done.stdout)
    missed = [
        *found["untold"].values(),
        *(one["reason"] for one in found["links"] if not one["mib_s"]),
    ]
    assert (done.returncode == Exit.OK) == (not missed), done.stderr
    assert all(any(why in one for why in STOOD) for one in missed), found
    return None if missed else found


def test_nodes_without_ranks_measure_each_other_and_the_figures_are_printed(
    cluster: Cluster,
) -> None:
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "3", "--nproc-per-node", "1", node=node)
    for node in ("node-1", "node-2"):
        cluster.until_fact("node_joined", partial(is_about, node))
    found = until(partial(measured, cluster), "both have had their turn")
    assert (found["schema"], found["slow"], found["untold"]) == ("everstep.network_test/v1", [], {})
    (link,) = found["links"]
    assert {link["from"], link["to"]} == {"node-1", "node-2"}
    assert link["mib_s"] > 1
    act = cluster.until_fact("operator_acted")
    assert (act["action"], act["reason"]) == ("measure_network", "all-reduce is slow")
    cluster.steady("--nnodes", "3", "--nproc-per-node", "1", node="node-3")
    cluster.until_stepping(1)
    cluster.finish()
    cluster.until_done()


def test_the_first_round_waits_until_its_nodes_have_added_numbers_as_ranks_do(
    cluster: Cluster,
) -> None:
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "2", "--network-test", "first", node=node)
    cluster.until_stepping(1)
    figures = cluster.facts("network_measured")
    assert sorted(body["node"] for body in figures) == ["node-1", "node-2"]
    (link,) = (link for body in figures for link in body.get("links", ()))
    assert (link["backend"], link.get("reason")) == ("gloo", None)
    assert link["sums_mib_s"] > 1
    console = cluster.agents[0].log.read_text()
    asked, told = (
        console.index(f"{verb} the network before round 1") for verb in ("tests", "has tested")
    )
    assert asked < told
    assert " over gloo" in console[told:]
    cluster.finish()
    cluster.until_done()
