"""Where no round may follow, the nodes whose ranks are parked save before the job ends."""

from everstep.messages import ActionDecided, JobEnded, SaveParked
from tests.unit.rendezvous.world import World, spec


def fail(world: World, node: str = "n1") -> None:
    world.report(node, "rank_exited", rank=0, exit_code=-9, fingerprint="f")


def orders(world: World) -> list[tuple[str | None, SaveParked]]:
    return [(to, order) for to, order in world.orders if isinstance(order, SaveParked)]


def test_a_job_without_restarts_ends_once_its_parked_ranks_have_saved() -> None:
    world = World(spec(max_restarts=0)).started("n1", "n2")
    fail(world)
    world.back("n2", unsaved=2)
    assert orders(world) == [], "n1 may have parked ranks, too"
    replies = world.back("n1", unsaved=1)
    assert [reply.exit_code for reply in replies] == [None]
    (first, one), (second, two) = orders(world)
    assert (first, one.first_rank, one.world_size) == ("n1", 0, 3)
    assert (second, two.first_rank, two.master_address) == ("n2", 1, "n1")
    assert (one.round, one.within_s, one.master_port) == (1, world.spec.stop_grace_s, 29_500)
    world.back("n1")
    assert world.of(JobEnded) == []
    world.back("n2")
    (ended,) = world.of(JobEnded)
    assert (ended.state, ended.exit_code) == ("failed", 1)
    assert len(orders(world)) == 2
    assert len(world.of(ActionDecided)) == 1


def test_a_save_that_does_not_end_keeps_no_job() -> None:
    world = World(spec(nodes=1, max_restarts=0)).started("n1")
    fail(world)
    world.back("n1", unsaved=1)
    world.tick(2 * world.spec.stop_grace_s)
    assert world.of(JobEnded) == []
    world.tick(world.settings.last_call_s)
    assert len(world.of(JobEnded)) == 1


def test_ranks_that_nobody_has_parked_delay_nothing() -> None:
    world = World(spec(nodes=1, max_restarts=0)).started("n1")
    fail(world)
    world.back("n1")
    assert len(world.of(JobEnded)) == 1
    assert orders(world) == []


def test_a_job_that_waits_for_a_lost_node_saves_at_once_and_still_waits() -> None:
    world = World(spec(join_within_s=600.0)).started("n1", "n2")
    world.gone("n2")
    world.back("n1", unsaved=2)
    world.tick(world.settings.say_waiting_after_s)
    assert [(to, order.world_size) for to, order in orders(world)] == [("n1", 2)]
    world.back("n1")
    world.tick(1.0)
    world.join("n3")
    assert (world.doc.phase, world.doc.round) == ("forming", 2)
    assert len(orders(world)) == 1
