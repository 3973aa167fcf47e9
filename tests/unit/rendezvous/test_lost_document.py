"""A document that was lost is made again from the agents that run on."""

import pytest

from everstep.messages import IncidentOpened, RoundDocument, RoundEnded, StopRanks
from tests.unit.rendezvous.world import World, names, spec


def forgotten(world: World, **settings: object) -> World:
    """The same job, whose document is lost; the agents and their orders are as before."""
    after = World(world.spec, **settings)
    after.ids = world.ids
    after.orders = [(to, order) for to, order in world.orders if to is not None]
    after.now = world.now
    return after


def come_back(world: World, node: str, **fields: object) -> str:
    """A node that runs on asks whether it may; return the state in the answer."""
    order = world.order(node)
    replies = world.join(node, running=order, known_round=order.round, last_round=None, **fields)
    return replies[0].standing


def elastic() -> World:
    """Two nodes of a job that may have four run its second round."""
    world = World(spec(2, nodes_max=4, max_restarts=5), elastic_wait_s=1)
    world.join("n0", "n1")
    world.tick(1)
    world.run()
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0", "n1")
    world.tick(1)
    world.run()
    assert (world.doc.round, world.doc.slots) == (2, 2)
    return world


def placed(doc: RoundDocument) -> list[object]:
    return [doc.slots, doc.world_size, doc.master_address, doc.master_port, doc.restarts]


def test_a_round_goes_on_as_it_was_formed_and_comes_to_its_good_end() -> None:
    """Agents report their round, and its document is as before (A14.3)."""
    before = elastic()
    world = forgotten(before)
    assert [come_back(world, node) for node in ("n1", "n0")] == ["member", "member"]
    assert (world.doc.phase, world.doc.round, world.members()) == ("running", 2, ["n0", "n1"])
    assert placed(world.doc) == placed(before.doc)
    for node in ("n0", "n1"):
        world.report(node, "finished")
    assert (world.doc.phase, world.doc.exit_code) == ("done", 0)


def test_the_next_round_has_a_number_that_none_had() -> None:
    world = forgotten(elastic(), elastic_wait_s=1)
    for node in ("n0", "n1"):
        come_back(world, node)
    world.report("n0", "rank_exited", exit_code=1)
    world.back("n0", "n1")
    world.tick(1)
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("forming", 3, 2)


def test_ranks_that_had_finished_before_are_not_waited_for() -> None:
    world = forgotten(elastic())
    come_back(world, "n0", running_state="finished")
    come_back(world, "n1")
    world.report("n1", "finished")
    assert world.doc.phase == "done"


def test_ranks_that_finish_before_a_late_join_seats_them_are_not_waited_for() -> None:
    """Their report found no seat; the join that made it was older than the report."""
    world = forgotten(elastic())
    come_back(world, "n0")
    come_back(world, "n0", running_state="finished")
    come_back(world, "n1")
    world.report("n1", "finished")
    assert world.doc.phase == "done"


def test_a_rank_that_had_failed_before_ends_the_round() -> None:
    world = forgotten(elastic())
    come_back(world, "n0")
    come_back(world, "n1", running_state="failed")
    assert world.doc.phase == "ending"
    assert [one.node for one in world.of(IncidentOpened)] == ["n1"]


def test_spares_that_come_first_form_no_round_beside_the_one_that_runs() -> None:
    world = forgotten(elastic(), elastic_wait_s=10)
    world.join("n8", "n9", known_round=2)
    world.tick(9)
    assert (world.doc.phase, world.doc.round) == ("joining", 2)
    assert [come_back(world, node) for node in ("n0", "n1")] == ["member", "member"]
    assert (world.doc.phase, world.members()) == ("running", ["n0", "n1"])


def test_spares_form_a_later_round_when_nobody_runs_one() -> None:
    world = forgotten(elastic(), elastic_wait_s=10)
    world.join("n8", "n9", known_round=2)
    world.tick(11)
    assert (world.doc.phase, world.doc.round, world.members()) == ("forming", 3, ["n8", "n9"])


def test_of_two_worlds_neither_goes_on() -> None:
    """New nodes had formed a round before anybody who knew of the job could be heard."""
    world = forgotten(elastic(), elastic_wait_s=1)
    world.join("n8", "n9")
    world.tick(1)
    world.run()
    assert world.doc.round == 1
    order = world.order("n0")
    reply = world.join("n0", running=order, known_round=2)[0]
    assert isinstance(reply.order, StopRanks)
    assert reply.order.round == 2
    assert [one.cause for one in world.of(RoundEnded)] == ["document_lost"]
    world.back("n8", "n9")
    world.join("n0", known_round=2)
    world.tick(1)
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("forming", 3, 0)


def test_a_world_that_a_late_join_began_ends_when_its_agent_knows_a_newer_one() -> None:
    """The late question was sent before the agent knew of any round; its ranks run in another."""
    before = World(spec(1)).started("n0")
    before.report("n0", "rank_exited", exit_code=1)
    before.back("n0")
    world = forgotten(before)
    world.join("n0")
    assert (world.doc.phase, world.doc.round) == ("forming", 1)
    reply = world.join("n0", running=before.order("n0"), known_round=2)[0]
    assert isinstance(reply.order, StopRanks)
    assert reply.order.round == 2
    assert [one.cause for one in world.of(RoundEnded)] == ["document_lost"]
    world.back("n0", known_round=2)
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("forming", 3, 0)


def test_a_round_that_a_late_join_formed_again_ends_when_its_agent_runs_the_first() -> None:
    """The number is the same, and the order another: the agent takes it for a repetition."""
    before = World(spec(1)).started("n0")
    world = forgotten(before)
    world.join("n0")
    assert (world.doc.phase, world.doc.round) == ("forming", 1)
    reply = world.join("n0", running=before.order("n0"), known_round=1)[0]
    assert isinstance(reply.order, StopRanks)
    assert [one.cause for one in world.of(RoundEnded)] == ["document_lost"]
    world.back("n0", known_round=1)
    assert (world.doc.phase, world.doc.round, world.doc.restarts) == ("forming", 2, 0)


def test_an_agent_without_ranks_that_knows_a_newer_round_is_given_one_at_once() -> None:
    world = World(spec(1))
    world.join("n0")
    assert (world.doc.phase, world.doc.round) == ("forming", 1)
    world.join("n0", known_round=2, last_round=2)
    assert [one.cause for one in world.of(RoundEnded)] == ["document_lost"]
    assert (world.doc.phase, world.doc.round) == ("forming", 3)


@pytest.mark.parametrize("claimed", [1, 2])
def test_a_slot_that_nobody_claims_is_lost_when_all_others_have_waited(claimed: int) -> None:
    before = World(spec(3)).started(*names(3))
    world = forgotten(before, join_within_s=60)
    for node in names(3)[:claimed]:
        come_back(world, node)
    world.tick(100)
    assert world.doc.phase == "running"  # the others train: nothing is known against it
    for node in names(3)[:claimed]:
        world.report(node, "finished")
    world.tick(59)
    assert world.doc.phase == "running"
    world.tick(2)
    assert [one.cause for one in world.of(RoundEnded)] == ["node_lost"]
