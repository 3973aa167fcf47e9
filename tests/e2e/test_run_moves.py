"""Ranks that exit with 16 or 17 on purpose start again on other nodes, or stop the job."""

import pytest

from tests.e2e.cluster import Agent, Cluster
from tests.e2e.processes import SCRIPTS


def training(cluster: Cluster, *nodes: str, slots: int, **environ: str) -> list[Agent]:
    agents = [
        cluster.run(
            *("--cold", "--nnodes", str(slots), "--nproc-per-node", "2", "--max-restarts", "0"),
            *("--spares", str(len(nodes) - slots), "--infra-rank", str(place)),
            *(str(SCRIPTS / "leaving.py"), str(cluster.folder)),
            node=node,
            **environ,
        )
        for place, node in enumerate(nodes)
    ]
    cluster.until_stepping(1)
    return agents


def leave(cluster: Cluster, code: int) -> None:
    (cluster.folder / "code").write_text(str(code))
    cluster.finish()


@pytest.mark.parametrize("spares", [0, 1])
def test_ranks_that_ask_for_it_start_again_on_other_nodes(cluster: Cluster, spares: int) -> None:
    nodes = [f"node-{number + 1}" for number in range(2 + spares)]
    agents = training(cluster, *nodes, slots=2, MEANT="1")
    if spares:
        cluster.until_facts("node_joined", lambda joined: len(joined) == 3)
    before = cluster.members(1)
    leave(cluster, 16)
    cluster.until_stepping(2)
    after = cluster.members(2)
    assert len(after) == 2
    assert not before.items() & after.items()
    assert not spares or set(after.values()) - set(before.values())
    assert cluster.state()["restarts"] == 0
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["outcome"]) == ("numerics", "recovered")
    assert sum("they start on other nodes" in agent.said for agent in agents) == 2
    leave(cluster, 0)
    cluster.until_done()


def test_the_only_node_keeps_its_ranks_and_tells_it(cluster: Cluster) -> None:
    (agent,) = training(cluster, "node-1", slots=1, MEANT="1")
    leave(cluster, 16)
    cluster.until_stepping(2)
    assert "its ranks asked to move: they start on the same node, for no other" in agent.said
    leave(cluster, 0)
    cluster.until_done()


def test_ranks_that_reject_their_result_stop_the_job_for_good(cluster: Cluster) -> None:
    agents = training(cluster, "node-1", "node-2", slots=2, MEANT="1")
    leave(cluster, 17)
    assert [agent.wait() for agent in agents] == [93, 93]
    ended = cluster.until_fact("job_ended")
    assert (ended["state"], ended["exit_code"], ended["rounds"]) == ("stopped", 93, 1)
    assert "its result is wrong, and it asks to stop the job" in ended["reason"]
    again = cluster.run(
        *("--cold", "--nnodes", "2", "--nproc-per-node", "2", "--max-restarts", "0"),
        *("--spares", "0", str(SCRIPTS / "leaving.py"), str(cluster.folder)),
        MEANT="1",
    )
    assert again.wait() == 93, "a requeue does not bring it back"


def test_the_same_code_of_any_other_script_is_a_failure(cluster: Cluster) -> None:
    (agent,) = training(cluster, "node-1", slots=1)
    leave(cluster, 16)
    assert agent.wait() == 1
    assert cluster.until_fact("round_ended")["cause"] == "rank_exited"
