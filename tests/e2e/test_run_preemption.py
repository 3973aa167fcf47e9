"""Nodes are taken away: every rank of the job saves after the same step, then they leave."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.e2e import failure_logs
from tests.e2e.cluster import Agent, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, Pieces, Up, running_up
from tests.e2e.processes import SCRIPTS
from tests.variants import variant
from tests.waiting import until

START_WITHIN_S = 90.0
AGREE_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def unhurried_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A control plane that names a step early enough for agents that get no turn for a while."""
    folder = tmp_path_factory.mktemp("up")
    settings = {**PATIENT, "EVERSTEP_RENDEZVOUS__SAVE_LEAD_S": "6"}
    with failure_logs.shared("unhurried_up", folder), running_up(folder, **settings) as up:
        yield up


@pytest.fixture
def cluster(new_cluster: NewCluster, unhurried_up: Up, job: str) -> Cluster:
    return new_cluster(unhurried_up, job)


def asking(
    cluster: Cluster,
    *options: str,
    node: str,
    how: str = "ask",
    agree_within_s: float = AGREE_WITHIN_S,
) -> Agent:
    """An agent with two ranks, of a training that asks whether it should stop."""
    script = (str(SCRIPTS / "asking.py"), str(cluster.folder), how)
    environ = {"EVERSTEP_AGENT__AGREE_WITHIN_S": f"{agree_within_s:g}"}
    return cluster.run("--nproc-per-node", "2", *options, *script, node=node, **environ)


def steps(cluster: Cluster, ranks: int = 4) -> list[int]:
    """After which step each rank has saved, once all have."""
    return until(
        lambda: [int((cluster.folder / f"saved-{rank}").read_text()) for rank in range(ranks)],
        f"{ranks} ranks have saved",
        despite=(FileNotFoundError, ValueError),  # one that is being written is empty
    )


def two_nodes(cluster: Cluster, *options: str, how: str = "ask") -> list[Agent]:
    agents = [
        asking(cluster, "--nnodes", "2", *options, node=node, how=how)
        for node in ("node-1", "node-2")
    ]
    cluster.until_stepping(1, START_WITHIN_S)
    return agents


@pytest.mark.parametrize(
    ("name", "to"), [("SIGTERM", (0, 1)), variant("SIGUSR1", (0, 1)), variant("SIGUSR2", (1,))]
)
def test_all_ranks_save_after_the_same_step_and_all_agents_exit_with_91(
    cluster: Cluster, name: str, to: tuple[int, ...]
) -> None:
    """With a grace of 900 s; data workers live on (A12.1)."""
    agents = two_nodes(cluster, "--preempt-grace", "900")
    for number in to:
        agents[number].send(signal.Signals[name])
    assert [agent.wait(START_WITHIN_S) for agent in agents] == [91, 91]
    assert len(set(steps(cluster))) == 1
    lived = [(cluster.folder / f"worker-{rank}").read_text() for rank in range(4)]
    assert lived == ["lived"] * 4
    ended = cluster.until_fact("allocation_ended")
    assert (ended["state"], ended["exit_code"]) == ("preempted", 91)
    noticed = cluster.until_fact("preemption_noticed")
    assert (noticed["reason"], noticed["grace_s"]) == (name, 900.0)
    planned = cluster.until_fact("preemption_planned")
    assert (planned["plan"], planned["stop_after_step"]) == ("save_and_exit", steps(cluster)[0])
    seen = cluster.until_facts("preemption_acknowledged", lambda found: len(found) >= 2)
    assert {(fact["node"], fact["step"]) for fact in seen} == {
        (agent.node, steps(cluster)[0]) for agent in agents
    }
    (saved,) = cluster.until_facts("preemption_saved")
    assert saved["step"] == steps(cluster)[0]
    exited = cluster.until_facts("rank_exited", lambda found: len(found) == 4)
    assert not any(fact.get("signal") for fact in exited)
    assert cluster.facts("job_ended") == []


def test_with_a_spare_all_save_and_the_training_goes_on_without_the_node(cluster: Cluster) -> None:
    two_nodes(cluster, "--spares", "1")
    spare = asking(cluster, "--nnodes", "2", "--spares", "1", node="node-3")
    cluster.until_fact("node_joined", lambda body: body["node"] == "node-3")
    before = cluster.members(1)
    taken = next(agent for agent in cluster.agents if agent.node == before[1])
    taken.send(signal.SIGTERM)
    assert taken.wait(START_WITHIN_S) == 91
    assert len(set(steps(cluster))) == 1
    assert cluster.until_fact("preemption_planned")["plan"] == "replace"
    cluster.until_stepping(2, START_WITHIN_S)
    assert cluster.members(2) == {0: before[0], 1: spare.node}
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["outcome"]) == ("preempted", "recovered")
    assert cluster.state()["restarts"] == 0
    cluster.finish()
    assert [agent.wait() for agent in cluster.agents if agent is not taken] == [0, 0]


def test_ranks_that_do_not_ask_are_stopped_when_the_grace_is_over(cluster: Cluster) -> None:
    """The record says that the save was missed (A12.1)."""
    agent = asking(cluster, "--preempt-grace", "3", node="node-1", how="ignore")
    cluster.until_stepping(1, START_WITHIN_S)
    began = time.monotonic()
    agent.send(signal.SIGTERM)
    assert agent.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began >= 3
    missed = cluster.until_fact("preemption_missed")
    assert missed["reason"] == "ranks still ran"


@pytest.mark.variant
def test_a_second_notice_does_not_end_ranks_that_save(cluster: Cluster) -> None:
    (cluster.folder / "slow").touch()
    agent = asking(cluster, node="node-1")
    cluster.until_stepping(1, START_WITHIN_S)
    agent.send(signal.SIGUSR1)
    cluster.until_fact("preemption_acknowledged")
    agent.send(signal.SIGTERM)
    (cluster.folder / "slow").unlink()
    assert agent.wait() == 91
    assert len(set(steps(cluster, 2))) == 1


@pytest.mark.variant
def test_an_operator_s_stop_saves_after_the_same_step(cluster: Cluster) -> None:
    agents = two_nodes(cluster)
    body = {"reason": "enough", "save_first": True}
    cluster.api.post(f"jobs/{cluster.job}:stop", body)
    assert [agent.wait(START_WITHIN_S) for agent in agents] == [93, 93]
    assert len(set(steps(cluster))) == 1


def test_a_stop_holds_although_a_rank_is_killed_before_all_have_saved(cluster: Cluster) -> None:
    """The kill has a verdict of its own: the person who stopped the job did not cause it."""
    agents = two_nodes(cluster)
    (cluster.folder / "slow").touch()
    cluster.api.post(f"jobs/{cluster.job}:stop", {"reason": "enough", "save_first": True})
    cluster.kill_rank(2, 1)
    assert [agent.wait(START_WITHIN_S) for agent in agents] == [93, 93]
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["outcome"]) == ("rank_exited", "stopped")
    decided = cluster.until_fact("action_decided")
    assert (decided["action"], decided["rule"]) == ("stop", "stop.ordered")
    assert len(cluster.facts("round_formed")) == 1
    verdict = cluster.until_fact("verdict_reached", lambda body: body["kind"] == "killed")
    assert verdict["culprit_ranks"] == [2]


def test_without_a_control_plane_a_node_saves_all_the_same(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    cluster = new_cluster(shared_pieces, job)
    agent = asking(cluster, node="node-1", agree_within_s=1)
    cluster.until_stepping(1, START_WITHIN_S)
    shared_pieces.kill("rendezvous")
    agent.send(signal.SIGTERM)
    assert len(set(steps(cluster, 2))) == 1
    assert agent.wait(START_WITHIN_S) == 91
