"""The control plane goes away: trainings run on, and rounds end when it is back."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.conftest import START_WITHIN_S, NewCluster
from tests.e2e.control_planes import ALL, PATIENT, Pieces
from tests.e2e.processes import SCRIPTS
from tests.variants import variant
from tests.waiting import until

AWAY = (("nats",), ("rendezvous",), ("history",), ("health",), ("catalog",), ("straggler",), ALL)


def step_of(cluster: Cluster) -> int:
    saved = cluster.folder / "step"
    return int(saved.read_text()) if saved.exists() else 0


def further(cluster: Cluster, steps: int) -> None:
    """The training makes this number of further steps: about 50 a second."""
    goal = step_of(cluster) + steps
    until(lambda: step_of(cluster), f"step {goal}", holds=lambda step: step >= goal)


def test_a_training_runs_on_whatever_is_away(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str
) -> None:
    """Each service is killed, then all, and the training goes on (A2.6, A10.4, A14.1, A15.1)."""
    cluster = new_cluster(shared_pieces, job)
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "2", node=node)
    cluster.until_stepping(1)
    for names in AWAY:
        shared_pieces.kill(*names)
        further(cluster, 50)
        for name in names:
            shared_pieces.revive(name)
        further(cluster, 5)
    shared_pieces.kill("nats")
    further(cluster, 100)
    shared_pieces.revive("nats")
    further(cluster, 5)
    cluster.kill_rank(0, 1)
    cluster.until_stepping(2)
    cluster.finish()
    cluster.until_done()
    assert [one["trigger"] for one in cluster.incidents()] == ["rank_exited"]
    assert [one["round"] for one in cluster.facts("round_formed")] == [1, 2]
    assert cluster.facts("node_lost") == []


@pytest.fixture
def soon(tmp_path: Path) -> Iterator[Pieces]:
    """A control plane that probes members which it has not heard after 3 s."""
    pieces = Pieces(tmp_path, **PATIENT, EVERSTEP_RENDEZVOUS__UNHEARD_AFTER_S="3")
    try:
        pieces.start(START_WITHIN_S)
        yield pieces
    finally:
        pieces.stop()


def test_a_node_that_dies_with_the_control_plane_is_replaced(
    soon: Pieces, new_cluster: NewCluster, job: str
) -> None:
    """Agents of the next allocation must not stand by for a node that nobody hears (A12.3)."""
    cluster = new_cluster(soon, job)
    first = cluster.steady()
    cluster.until_stepping(1)
    soon.kill(*ALL)
    first.kill_node()
    soon.restart(*ALL)
    cluster.steady(node="node-2")
    cluster.until_stepping(2)
    (incident,) = cluster.closed(1)
    assert (incident["trigger"], incident["node"]) == ("node_lost", "node-1")
    cluster.finish()
    cluster.until_done()


Reach = Callable[[Cluster], Callable[[], None]]
"""Brings a job of two nodes into a phase; what it returns lets the round go on."""


def joining(cluster: Cluster) -> Callable[[], None]:
    cluster.steady("--nnodes", "2")
    cluster.until_fact("node_joined")
    return lambda: void(cluster.steady("--nnodes", "2", node="node-2"))


def starting(cluster: Cluster) -> Callable[[], None]:
    """The round has formed; one agent has its order and does nothing."""
    cluster.steady("--nnodes", "3")
    paused = cluster.steady("--nnodes", "3", node="node-2")
    cluster.until_fact("node_joined", lambda body: body["node"] == "node-2")
    paused.send(signal.SIGSTOP)
    cluster.steady("--nnodes", "3", node="node-3")
    cluster.until_fact("round_formed")
    return lambda: paused.send(signal.SIGCONT)


def before_the_first_step(cluster: Cluster) -> Callable[[], None]:
    (cluster.folder / "hold").touch()
    for node in ("node-1", "node-2"):
        cluster.steady("--nnodes", "2", node=node)
    cluster.until_fact("round_started")
    return (cluster.folder / "hold").unlink


def ending(cluster: Cluster) -> Callable[[], None]:
    """A round is being stopped; its other rank does not care for SIGTERM."""
    for node in ("node-1", "node-2"):
        cluster.run(
            *("--cold", "--nnodes", "2", "--stop-grace", "1.5"),
            *(str(SCRIPTS / "deaf.py"), str(cluster.folder)),
            node=node,
        )
    cluster.until_stepping(1)
    cluster.kill_rank(0, 1)
    cluster.until_fact("action_decided")
    return lambda: None


def void(_: object) -> None:
    """Of a call whose result nobody needs."""


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(ALL, id="all"),
        pytest.param(("nats",), id="nats", marks=pytest.mark.chaos),
        pytest.param(("rendezvous",), id="rendezvous", marks=pytest.mark.chaos),
        pytest.param(("history",), id="history", marks=pytest.mark.chaos),
        pytest.param(("health",), id="health", marks=pytest.mark.chaos),
        pytest.param(("catalog",), id="catalog", marks=pytest.mark.chaos),
        pytest.param(("straggler",), id="straggler", marks=pytest.mark.chaos),
    ],
)
@pytest.mark.parametrize(
    "reach", [variant(joining), starting, variant(before_the_first_step), ending]
)
def test_a_round_comes_to_its_end_when_they_are_back(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str, reach: Reach, names: tuple[str, ...]
) -> None:
    """Services are killed in each phase of a round, which then completes (A2.6)."""
    cluster = new_cluster(shared_pieces, job)
    go_on = reach(cluster)
    shared_pieces.kill(*names)
    if reach is not joining:  # a new agent must find somebody
        go_on()
    for name in names:
        shared_pieces.revive(name)
    if reach is joining:
        go_on()
    rounds = 2 if reach is ending else 1
    cluster.until_stepping(rounds)
    cluster.finish()
    cluster.until_done()
    assert [one["round"] for one in cluster.facts("round_formed")] == [*range(1, rounds + 1)]
    assert len(cluster.incidents()) == rounds - 1


@pytest.mark.parametrize(
    ("end", "code"),
    [variant("finish", 0), variant("fail", 94), ("SIGTERM", 143), variant("SIGINT", 130)],
)
def test_no_end_waits_for_a_bus_that_is_away(
    shared_pieces: Pieces, new_cluster: NewCluster, job: str, end: str, code: int
) -> None:
    """Acceptance: A14.1."""
    cluster = new_cluster(shared_pieces, job)
    after = new_cluster(shared_pieces, f"{job}-after")
    shared = {"EVERSTEP_STATE_DIR": str(cluster.folder / "state")}
    bounded = {"EVERSTEP_AGENT__UNHEARD_WITHIN_S": "1", **shared}
    agent = cluster.steady("--nproc-per-node", "2", UNMODIFIED="1", **bounded)
    cluster.until_all_step(2)
    shared_pieces.kill("nats")
    until(lambda: "the bus is away" in agent.said, "it knows")
    if end == "finish":
        cluster.finish()
    elif end == "fail":
        cluster.kill_rank(1, 1)
    else:
        agent.send(signal.Signals[end])
    assert agent.wait() == code
    shared_pieces.revive("nats")
    following = after.steady(**shared)
    ended = cluster.until_facts("rank_exited", lambda found: len(found) >= 1)
    after.finish()
    assert following.wait() == 0
    assert any(fact.get("exit_code") == 0 for fact in ended) == (end == "finish")
