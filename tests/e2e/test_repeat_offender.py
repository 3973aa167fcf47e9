"""A node that verdicts name again and again leaves for a spare, where that is switched on."""

import shutil

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Body, Cluster
from tests.e2e.operators import ask, command, operator

REPLACE = "replace.repeat_offender"


def blamed(cluster: Cluster, node: str, number: int) -> Body:
    """Its rank is killed in a round: the verdict that names it."""
    cluster.until_stepping(number)
    cluster.kill_rank(1, number)

    def names_it(body: Body) -> bool:
        return body["round"] == number and body.get("culprit_nodes") == [node]

    return cluster.until_fact("verdict_reached", names_it)


def used(cluster: Cluster, verdict: Body) -> tuple[Body, Body]:
    """What the rule decided about a verdict's incident, and what came of it."""

    def is_of_it(body: Body) -> bool:
        return (body["rule"], body["incident"]) == (REPLACE, verdict["incident"])

    decided = cluster.until_fact("action_decided", is_of_it)
    taken = cluster.until_fact("action_taken", lambda body: body["decision"] == decided["id"])
    return decided, taken


def test_a_repeat_offender_is_replaced_by_the_spare_once_that_is_switched_on(
    cluster: Cluster,
) -> None:
    """Its storage has failed, and its rank dies twice: observed; the third time it goes (A7.1)."""
    options = ("--nnodes", "2", "--spares", "1", "--nproc-per-node", "1", "--max-restarts", "9")
    nodes = [f"{cluster.job}-{number}" for number in (1, 2, 3)]
    for node in nodes:
        (cluster.folder / f"data-{node}").mkdir()

    def start(node: str) -> None:
        storage = str(cluster.folder / f"data-{node}")
        cluster.steady(*options, node=node, EVERSTEP_CHECKS__STORAGE_PATHS=storage)

    for node in nodes[:2]:
        start(node)
    cluster.until_stepping(1)
    start(nodes[2])
    cluster.until_fact("node_joined", lambda body: body["node"] == nodes[2])
    before = cluster.members(1)
    offender = before[1]
    shutil.rmtree(cluster.folder / f"data-{offender}")
    said = command(
        operator(cluster.plane, cluster.folder),
        *("node", "check", offender, "storage", "--api", cluster.plane.api),
    )
    assert said.returncode == Exit.ERROR, said.stdout

    assert blamed(cluster, offender, 1)["cause"] == "storage"
    decided, taken = used(cluster, blamed(cluster, offender, 2))
    assert (decided["mode"], taken["outcome"], decided["nodes_out"]) == (
        "observe",
        "observed",
        [offender],
    )
    switch = "attribution.repeat_offenders=enforce"
    ask(cluster, "control", "set", switch, "--job", cluster.job, "--reason", "spares are there")
    assert cluster.members(3) == before, "that it was observed has changed nothing"

    decided, taken = used(cluster, blamed(cluster, offender, 3))
    assert (decided.get("mode", "enforce"), taken["outcome"]) == ("enforce", "done"), taken
    without = cluster.until_fact(
        "round_formed", lambda body: offender not in {member[1] for member in body["members"]}
    )
    assert cluster.members(without["round"]) == {**before, 1: nodes[2]}
    assert next(one for one in cluster.agents if one.node == offender).wait() == 0
    cluster.until_stepping(without["round"])
    cluster.finish()
    cluster.until_done()
