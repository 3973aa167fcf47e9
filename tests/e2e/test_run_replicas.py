"""The state of a lost node is in the memory of another, and goes to the next holder of its slot."""

import json
import os

from tests.e2e.cluster import Body, Cluster
from tests.e2e.processes import SCRIPTS

NODES = ("node-1", "node-2", "node-3")


def stored_of(cluster: Cluster, slot: int) -> Body:
    return cluster.until_fact("replica_stored", lambda body: body["owner_slot"] == slot)


def test_who_takes_a_slot_over_finds_its_state_and_nothing_is_left_at_the_end(
    cluster: Cluster,
) -> None:
    """A killed node's state comes from its keeper (A9.1)."""
    agents = {
        node: cluster.run(
            *("--cold", "--nnodes", "2", "--nproc-per-node", "2", "--spares", "1"),
            *("--infra-rank", str(place), "--stop-grace", "1"),
            *(str(SCRIPTS / "remembering.py"), str(cluster.folder)),
            node=node,
        )
        for place, node in enumerate(NODES)
    }
    cluster.until_facts("node_joined", lambda found: {one["node"] for one in found} == set(NODES))
    stored = {body["owner_slot"]: body for body in (stored_of(cluster, 0), stored_of(cluster, 1))}
    members = cluster.members(1)
    assert {slot: body["owner"] for slot, body in stored.items()} == members
    assert stored[1]["holder"] == members[0]
    lost = members[1]
    agents[lost].kill_node()
    cluster.until_stepping(2)
    found = {
        rank: json.loads((cluster.folder / f"found-2-{rank}").read_text()) for rank in range(4)
    }
    assert [tier for _, tier in found.values()] == ["own", "own", "held", "held"]
    assert all(step >= stored[1]["step"] for step, _ in found.values())
    cluster.finish()
    cluster.until_done()
    images = cluster.folder / "memory" / f"everstep-{os.getuid()}" / "images"
    # Its own agent could not remove it; the next one here would.
    assert {one.name for one in images.iterdir()} == {f"{cluster.job}@{lost}"}
