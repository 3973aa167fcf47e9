"""Ranks ask by their exit code for other nodes, or for the end of the job."""

from typing import Any

import pytest

from everstep.messages import (
    ActionDecided,
    DrainNode,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    OperatorActed,
    RestartJob,
    RoundEnded,
    RoundFormed,
)
from tests.unit.rendezvous.world import World, spec

MOVE: dict[str, Any] = {"rank": 0, "exit_code": 16, "asks": "move"}
STOP: dict[str, Any] = {"rank": 0, "exit_code": 17, "asks": "stop"}


def moved(world: World, *nodes: str, **fields: Any) -> World:
    """A rank asks for another node, and all nodes are back."""
    world.report(nodes[0], "rank_exited", **MOVE, **fields)
    world.back(*nodes)
    world.tick(1)
    return world


def test_ranks_that_ask_for_it_start_again_on_other_nodes_and_it_is_nobodys_failure() -> None:
    world = World(spec(2, max_restarts=0)).started("n0", "n1")
    world.join("n2")
    moved(world, "n0", "n1", step=9)
    assert (world.members(), world.doc.restarts, world.doc.exit_code) == (["n1", "n2"], 0, None)
    assert world.of(RoundEnded)[-1].cause == world.of(IncidentOpened)[-1].trigger == "numerics"
    (decided,) = world.of(ActionDecided)
    assert (decided.action, decided.rule) == ("restart", "restart.elsewhere")
    formed = world.of(RoundFormed)[-1]
    assert [it.reason for it in formed.replaced] == [
        "its ranks asked for another node: n0 rank_exited"
    ] * 2
    assert formed.reason.endswith(
        "no restart so far; its ranks asked to move: they start on other nodes"
    )
    world.run()
    assert world.of(IncidentClosed)[-1].outcome == "recovered"
    world.report("n1", "rank_exited", rank=0, exit_code=1)
    world.back("n1", "n2")
    assert world.doc.phase == "stopped", "a failure still costs a restart"


def test_without_a_spare_the_nodes_change_their_slots_and_keep_them_after_a_failure() -> None:
    world = moved(World(spec(3)).started("n0", "n1", "n2"), "n0", "n1", "n2")
    assert world.members() == ["n2", "n0", "n1"]
    world.run()
    world.report("n0", "rank_exited", rank=0, exit_code=1)
    world.back("n0", "n1", "n2")
    assert world.members() == ["n2", "n0", "n1"]


def test_a_node_without_another_is_said_to_stay() -> None:
    world = moved(World(spec(1)).started("n0"), "n0")
    assert world.members() == ["n0"]
    assert world.doc.reason.endswith("they start on the same node, for no other is here")


def test_the_other_ranks_ends_hide_no_move() -> None:
    """A closed connection is heard first, and then why."""
    world = World(spec(2, max_restarts=0)).started("n0", "n1")
    world.report("n1", "rank_exited", rank=2, exit_code=1, fingerprint="secondary:x")
    moved(world, "n0", "n1")
    assert (world.doc.phase, world.members()) == ("forming", ["n1", "n0"])


def test_a_move_is_remembered_by_the_replica_that_takes_over() -> None:
    world = moved(World(spec(2)).started("n0", "n1"), "n0", "n1", step=9)
    world.take_over()
    world.join("n0", "n1", running=None)
    world.run(stepped=False)
    moved(world, "n0", "n1", step=9)
    assert world.doc.restarts == 1


def test_ranks_that_reject_their_result_end_the_job_for_good() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n1", "rank_exited", **STOP)
    world.back("n0", "n1")
    ended = world.of(JobEnded)[-1]
    assert (ended.state, ended.exit_code, world.doc.restarts) == ("stopped", 93, 0)
    assert world.of(IncidentClosed)[-1].trigger == "numerics"
    assert world.join("n0", allocation="b")[0].exit_code == 93, "a requeue does not bring it back"


@pytest.mark.parametrize("origin", ["numerics", "script"])
@pytest.mark.parametrize("kind", [RestartJob, DrainNode])
def test_a_round_that_ends_for_a_result_is_an_incident_that_costs_no_restart(
    kind: type[RestartJob | DrainNode], origin: str
) -> None:
    """What a script itself asks for is none."""
    world = World(spec(2, max_restarts=0)).started("n0", "n1")
    world.join("n2")
    place: dict[str, Any] = {"round": 1} if kind is RestartJob else {"node": "n1"}
    world.apply(kind(job="j", by="rank 0 of n0", reason="it spiked", origin=origin, **place))
    world.back("n0", "n1")
    world.run()
    (ended,) = world.of(RoundEnded)
    closed = world.of(IncidentClosed)
    assert (world.doc.round, world.doc.restarts) == (2, 0)
    if origin == "script":
        assert (ended.cause, closed) == ("operator", [])
        return
    assert (ended.cause, closed[0].outcome, closed[0].next_round) == ("numerics", "recovered", 2)
    assert closed[0].reason.startswith("rank 0 of n0")
    assert world.of(OperatorActed)[0].origin == "numerics"


def test_a_word_of_a_newer_release_is_a_failure() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", rank=0, exit_code=18, asks="dance")
    assert world.of(IncidentOpened)[-1].trigger == "rank_exited"
