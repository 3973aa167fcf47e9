"""Agents, services and SDK of two releases work together, in either direction."""

from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, running_up
from tests.e2e.processes import SCRIPTS, python
from tests.e2e.test_attach import Launched, place
from tests.releases.conftest import VERSIONS, Releases
from tests.waiting import until

BOTH_WAYS = [("old", "new"), ("new", "old")]
NODES = ("node-1", "node-2", "node-3")


def judged(cluster: Cluster, number: int) -> list[str]:
    """The triggers of all incidents, once each has a verdict."""
    incidents = until(
        cluster.incidents,
        f"{number} incidents have verdicts",
        holds=lambda all_: len(all_) == number and all(each["cause"] for each in all_),
    )
    return [each["trigger"] for each in incidents]


@pytest.mark.parametrize(("agents", "services"), BOTH_WAYS)
def test_agents_of_one_release_train_under_services_of_the_other(
    releases: Releases,
    tmp_path: Path,
    new_cluster: NewCluster,
    job: str,
    agents: str,
    services: str,
) -> None:
    """A rank and a node are killed and replaced; all of it is on record and judged (A15.3)."""
    with running_up(tmp_path, **PATIENT, **releases[services]) as up:
        cluster = new_cluster(up, job)
        for node in NODES:
            cluster.steady("--nnodes", "2", "--spares", "1", node=node, **releases[agents])
        cluster.until_all_step(2)
        assert cluster.api.get("status")["version"] == VERSIONS[services]
        joined = cluster.until_facts("node_joined", lambda bodies: len(bodies) >= len(NODES))
        assert {body["version"] for body in joined} == {VERSIONS[agents]}
        cluster.kill_rank(1, 1)
        cluster.until_stepping(2)
        holder = cluster.members(2)[1]
        next(agent for agent in cluster.agents if agent.node == holder).kill_node()
        cluster.until_stepping(3)
        cluster.finish()
        cluster.until_done()
        assert judged(cluster, 2) == ["rank_exited", "node_lost"]


@pytest.mark.parametrize(("agents", "ranks"), BOTH_WAYS)
def test_an_agent_watches_ranks_whose_sdk_is_of_another_release(
    releases: Releases, tmp_path: Path, new_cluster: NewCluster, job: str, agents: str, ranks: str
) -> None:
    """The first rank brings its own agent; the second has the other release's SDK (A15.3)."""
    with running_up(tmp_path, **PATIENT) as up:
        launched = Launched(new_cluster(up, job))
        cluster, command = launched.cluster, python(str(SCRIPTS / "launched.py"), launched.where)
        first = launched.start(*command, **place(0, 2), **releases[agents])
        until(launched.agents, "an agent watches")
        second = launched.start(*command, **place(1, 2), **releases[ranks])
        cluster.until_all_step(2)
        assert len(launched.agents()) == 1
        held = launched.do("hold-1")
        stall = cluster.until_fact("rank_stalled", lambda body: body["rank"] == 1)
        assert stall["section"] == "data"
        held.unlink()
        cluster.until_fact("rank_recovered", lambda body: body["stall"] == stall["id"])
        launched.do("end")
        assert (first.wait(), second.wait()) == (0, 0)
        launched.until_nothing_is_left()


def test_a_checkpoint_of_the_release_before_is_restored(
    releases: Releases, tmp_path: Path, new_cluster: NewCluster, job: str
) -> None:
    """A rank of the new release goes on from it in one round with a rank of the old one (A15.3)."""
    with running_up(tmp_path, **PATIENT) as up:
        cluster = new_cluster(up, job)
        script = (str(SCRIPTS / "saving_model.py"), str(cluster.folder), "5", "0")
        options = ("--nnodes", "2", "--spares", "1", *script)
        for node in NODES[:2]:
            cluster.run(*options, node=node, **releases["old"])
        committed = cluster.until_fact("checkpoint_committed", lambda body: body["step"] >= 10)
        cluster.run(*options, node=NODES[2], **releases["new"])
        cluster.until_fact("node_joined", lambda body: body["node"] == NODES[2])
        cluster.agents[1].kill_node()
        cluster.until_stepping(2)
        assert set(cluster.members(2).values()) == {"node-1", "node-3"}
        for rank in range(2):
            step, _ = (cluster.folder / f"restored-2-{rank}").read_text().split(" ")
            assert int(step) >= committed["step"]
        cluster.finish()
        cluster.until_done()
