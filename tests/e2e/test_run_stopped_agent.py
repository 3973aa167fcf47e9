"""An agent gets no turn for some seconds, while its ranks and its warden live: nothing happens."""

import os
import signal
from collections.abc import Iterator

import pytest

from everstep_services.cli.errors import CliError
from tests.e2e import failure_logs
from tests.e2e.cluster import Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.control_planes import PATIENT, Up, running_up
from tests.e2e.operators import ask
from tests.e2e.test_run_nodes import standing_by, three
from tests.waiting import until

LIMIT_S = 5
SILENT_S = 1.6 * LIMIT_S
IMPATIENT = {
    **PATIENT,
    "EVERSTEP_HEALTH__SILENCE_LIMIT_S": f"{LIMIT_S}",
    "EVERSTEP_HEALTH__HAILED_LIMIT_S": f"{LIMIT_S}",
    "EVERSTEP_HEALTH__STOPPED_LIMIT_S": "300",
}


@pytest.fixture(scope="module")
def impatient_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """It waits for nobody who is silent, but for those whose wardens answer."""
    folder = tmp_path_factory.mktemp("impatient")
    with failure_logs.shared("impatient_up", folder), running_up(folder, **IMPATIENT) as up:
        yield up


@pytest.fixture
def impatient(new_cluster: NewCluster, impatient_up: Up, job: str) -> Cluster:
    return new_cluster(impatient_up, job)


def heard_age_s(cluster: Cluster) -> float:
    """For how long the second node has not been heard."""
    return float(cluster.ranks()[1]["heard_age_s"])


def two_nodes(cluster: Cluster) -> list[int]:
    """The processes of the ranks of two nodes; they make no step while the file `hold` is there."""
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "2", node=node)
    cluster.until_facts("rank_started", lambda found: len(found) == 2)
    return [cluster.pid_of(rank, 1) for rank in (0, 1)]


def stay_silent(cluster: Cluster) -> None:
    """Stop the agent of the second node for longer than a silent node is waited for."""
    stopped = next(agent for agent in cluster.agents if agent.node == cluster.members(1)[1])
    stopped.send(signal.SIGSTOP)
    until(
        lambda: heard_age_s(cluster),
        "it has been silent for long",
        holds=lambda age_s: age_s >= SILENT_S,
        despite=(CliError, KeyError),
    )
    stopped.send(signal.SIGCONT)


@pytest.mark.timeout(300)
def test_a_stopped_agent_costs_no_restart_while_nobody_steps(impatient: Cluster) -> None:
    """A15.2: unreachable is not failed, before the first step nor between two of them."""
    cluster, hold = impatient, impatient.folder / "hold"
    hold.touch()
    ranks = two_nodes(cluster)
    stay_silent(cluster)
    hold.unlink()
    cluster.until_all_step(2)
    for pid in ranks:  # in the middle of something that is not a step
        os.kill(pid, signal.SIGSTOP)
    stay_silent(cluster)
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    cluster.finish()
    cluster.until_done()
    assert cluster.facts("node_lost") == []
    assert cluster.incidents() == []
    assert cluster.until_fact("job_ended")["rounds"] == 1


def test_a_node_of_which_nothing_lives_is_lost_while_nobody_steps(impatient: Cluster) -> None:
    """Its agent, its warden and its ranks stand, as when the host is frozen."""
    hold = impatient.folder / "hold"
    hold.touch()
    ranks = two_nodes(impatient)
    frozen = next(one for one in impatient.agents if one.node == impatient.members(1)[1])
    pids = [frozen.pid, frozen.warden, ranks[1]]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    lost = impatient.until_fact("node_lost")
    assert lost["node"] == frozen.node
    assert "its warden answers" not in lost["reason"]
    impatient.until_fact("action_decided")  # before that it may still come back, and go on
    hold.unlink()
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    impatient.until_stepping(2)
    impatient.finish()
    impatient.until_done()


def test_a_spare_takes_the_slot_of_a_lost_node_and_no_other_moves(impatient: Cluster) -> None:
    """The survivors and the spare form the next round (A2.1)."""
    cluster = impatient  # nobody waits for the lost node: only its silence tells
    agents = three(cluster)
    before, spare = cluster.members(1), standing_by(cluster, 1)
    agents[before[1]].kill_node()
    cluster.until_stepping(2)
    assert cluster.members(2) == {0: before[0], 1: spare}
    lost = cluster.until_facts("node_lost")
    assert [body["node"] for body in lost] == [before[1]], "it is on record as lost, once"
    cluster.finish()
    cluster.until_done()
    (incident,) = cluster.incidents()
    assert incident["outcome"] == "recovered"
    formed = cluster.facts("round_formed")[1]
    assert [(one["slot"], one["node"], one["was"]) for one in formed["replaced"]] == [
        (1, spare, before[1])
    ]


@pytest.mark.chaos
def test_under_the_brake_a_node_that_is_only_silent_ends_no_round(impatient: Cluster) -> None:
    """Health may call a node lost that lives; a round in which all ranks live goes on."""
    hold = impatient.folder / "hold"
    hold.touch()
    two_nodes(impatient)
    ask(impatient, "brake", "set", "on", "--job", impatient.job, "--reason", "false alarms")
    frozen = next(one for one in impatient.agents if one.node == impatient.members(1)[1])
    pids = [frozen.pid, frozen.warden]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    lost = impatient.until_fact("node_lost")
    decided = impatient.until_fact("action_decided")
    assert (decided["mode"], decided["evidence"]) == ("observe", [lost["id"]])
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    impatient.until_fact("node_returned")
    hold.unlink()
    impatient.until_stepping(1)
    impatient.finish()
    impatient.until_done()
    assert impatient.until_fact("job_ended")["rounds"] == 1
