"""The bus comes back with an empty store: the round goes on, from what its agents say."""

import shutil

from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import ALL, Pieces
from tests.waiting import until


def test_a_round_with_fewer_nodes_than_it_may_have_comes_to_its_good_end(
    pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    """All services die, and JetStream's data with them (A14.3)."""
    cluster = new_cluster(pieces, job)
    agents = [cluster.steady("--nnodes", "1:3", node=node) for node in ("node-1", "node-2")]
    cluster.until_stepping(1)
    pieces.kill(*ALL)
    shutil.rmtree(pieces.store / "jetstream")  # streams; whom the server lets in is apart
    for name in ALL:
        pieces.revive(name)
    until(lambda: all("the bus is back" in agent.said for agent in agents), "the bus is back")
    cluster.finish()
    cluster.until_done()
    assert [one["round"] for one in cluster.facts("round_formed")] == [1]
    assert cluster.facts("job_ended")[0]["rounds"] == 1
