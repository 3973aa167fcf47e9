"""What an incident says: its cause, what was told of it, and where its time went."""

import pytest

from everstep.messages import IncidentClosed, IncidentExtended, IncidentOpened, StopJob, StopRanks
from tests.unit.rendezvous.world import World, names, spec


def test_the_loss_of_a_node_is_the_cause_of_what_its_peers_reported() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.join("n2")
    world.report("n0", "rank_exited", fingerprint="secondary:1", exit_code=1)
    world.gone("n1")
    world.back("n0")
    world.run()
    closed = world.of(IncidentClosed)[0]
    assert "n1 is gone" in closed.reason


def test_nodes_that_fall_together_are_named_together() -> None:
    world = World(spec(3)).started("n0", "n1", "n2")
    world.report("n0", "rank_exited", fingerprint="secondary:1", exit_code=1)
    world.gone("n1")
    world.gone("n2")
    world.gone("n2")
    world.back("n0")
    world.run()
    assert world.of(IncidentExtended)[-1].lost == ("n1", "n2")


def test_a_node_that_fell_with_others_is_named_though_it_is_decided_what_follows() -> None:
    world = World(spec(3, nodes_min=1)).started("n0", "n1", "n2")
    world.gone("n1")
    world.back("n0")
    world.tick(0.5)
    assert world.doc.incident is not None
    assert world.doc.incident.is_decided
    world.gone("n2")
    world.tick(60)
    world.run()
    assert world.of(IncidentExtended)[-1].lost == ("n1", "n2")
    assert "n2 is gone" in world.of(IncidentClosed)[-1].cause


def test_a_launch_that_was_interrupted_tells_its_last_step_and_not_what_is_made_again() -> None:
    world = World(spec(1)).started("n0")
    world.leave("n0", last_step=153)
    [opened], [closed] = world.of(IncidentOpened), world.of(IncidentClosed)
    assert (opened.step, closed.outcome, closed.lost_steps) == (153, "stopped", None)
    world.join("n0", instance="n0-2", allocation="b")
    assert world.order("n0").reached_step == 153, "what its first step counts from"


def test_sixty_four_ranks_one_raises_and_that_is_the_cause() -> None:
    """Secondary errors that are heard first are replaced by the cause (A4.5)."""
    world = World(spec(8)).started(*names(8))
    for number in (3, 1, 7, 5):
        world.report(f"n{number}", "rank_exited", fingerprint="secondary:x", exit_code=1)
    world.report("n6", "rank_exited", fingerprint="abc", exit_code=1, rank=13)
    incident = world.doc.incident
    assert incident is not None
    assert (incident.node, incident.rank, incident.fingerprint) == ("n6", 13, "abc")


@pytest.mark.parametrize("event", ["rank_exited", "rank_stalled"])
def test_who_made_the_fault_is_told_with_the_report_that_names_them(event: str) -> None:
    world = World(spec(2)).started("n0", "n1")
    if event == "rank_exited":  # what is heard first is not the cause
        world.report("n1", event, fingerprint="secondary:x", exit_code=1)
    world.report("n0", event, rank=0, waited_s=60, injected_by="ann")
    world.tick(60)
    world.back("n0", "n1")
    world.tick(60)
    world.run()
    [opened], [closed] = world.of(IncidentOpened), world.of(IncidentClosed)
    assert opened.injected_by == ("" if event == "rank_exited" else "ann")
    assert (closed.rank, closed.injected_by) == (0, "ann")


@pytest.mark.parametrize("explains", ["an exit", "the loss of a node"])
def test_ranks_may_end_by_themselves_until_something_explains_what_they_suffer(
    explains: str,
) -> None:
    world = World(spec(3)).started(*names(3))
    world.report("n1", "rank_exited", fingerprint="secondary:x", exit_code=1)
    world.report("n0", "rank_exited", fingerprint="secondary:y", exit_code=1)
    if explains == "an exit":
        world.report("n2", "rank_exited", fingerprint="abc", exit_code=1)
    else:
        world.gone("n2")
    orders = [order for _, order in world.orders if isinstance(order, StopRanks)]
    assert [order.cause_within_s for order in orders] == [0.3, 0.0]
    world.report("n0", "rank_exited", fingerprint="abc", exit_code=1)
    assert isinstance(world.orders[-1][1], StopRanks)
    assert [order for _, order in world.orders if isinstance(order, StopRanks)] == orders


def test_where_the_first_report_explains_it_nobody_waits() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n1", "rank_exited", fingerprint="abc", exit_code=1)
    world.report("n0", "rank_exited", fingerprint="secondary:x", exit_code=1)
    orders = [order for _, order in world.orders if isinstance(order, StopRanks)]
    assert [order.cause_within_s for order in orders] == [0.0]


def test_who_was_told_a_cause_is_told_the_better_one_that_follows() -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", fingerprint="abc", exit_code=1)
    world.gone("n1")
    world.report("n0", "rank_exited", fingerprint="abc", exit_code=1)
    orders = [order for _, order in world.orders if isinstance(order, StopRanks)]
    assert orders[0].reason == "n0 rank_exited"
    assert "n1 is gone" in orders[1].reason
    assert len(orders) == 2


def restarted(world: World, reached: int | None, first: int | None) -> IncidentClosed:
    """Its only rank dies after a step, and the next round makes its first step."""
    world.report("n0", "rank_exited", exit_code=1, step=reached)
    world.back("n0")
    world.tick(60)
    world.report("n0", "started")
    world.report("n0", "first_step", step=first)
    return world.of(IncidentClosed)[-1]


def test_the_steps_that_a_restart_makes_again_are_counted_where_the_script_numbers_them() -> None:
    world = World(spec(1, max_restarts=9)).started("n0")
    closed = restarted(world, 274, 1)
    assert closed.lost_steps == 274
    assert "round 2 began at step 0, with nothing restored: 274 steps are made again" in (
        closed.reason
    )
    assert world.order("n0").reached_step == 274
    assert restarted(world, 100, 1).lost_steps == 100, "not what was lost before"
    resumed = restarted(world, 120, 101)
    assert resumed.lost_steps == 20
    assert "round 4 went on from step 100: 20 steps are made again" in resumed.reason
    assert restarted(world, 130, 131).lost_steps == 0


def test_where_a_later_round_ended_alike_the_incident_keeps_the_cause_of_its_own_round() -> None:
    world = World(spec(2, max_restarts=9)).started("n0", "n1")
    world.report("n0", "rank_exited", rank=0, exit_code=1, fingerprint="abc")
    for node, rank in (("n1", 1), ("n0", 0)):
        world.back("n0", "n1")
        world.tick(60)
        world.report("n0", "started")
        world.report("n1", "started")
        if rank:
            world.report(node, "rank_exited", rank=rank, exit_code=1, fingerprint="abc")
    world.report("n0", "first_step", step=1)
    [closed] = world.of(IncidentClosed)
    assert (closed.cause, closed.rank, closed.node) == ("n0 rank_exited", 0, "n0")


def test_how_many_steps_are_made_again_is_not_known_if_the_script_does_not_number_them() -> None:
    world = World(spec(1)).started("n0")
    assert restarted(world, None, None).lost_steps is None


def test_the_ledger_says_where_the_time_went() -> None:
    """The phases of an incident add up to its wall time (A11.1)."""
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", exit_code=1, last_progress_age_s=0.5)
    world.tick(0.5)
    world.back("n0", evidence_s=0.1, stop_s=0.1)
    world.tick(0.5)
    world.back("n1", evidence_s=0.2, stop_s=0.3)
    world.tick(2)
    world.run(stepped=False)
    world.tick(4.5)
    world.report("n0", "first_step", step=1, restore_s=1.5, age_s=0.5)
    ledger = world.of(IncidentClosed)[0].ledger
    assert (ledger.unfinished_s, ledger.detect_s) == (0.5, 0.0), "its end was seen at once"
    assert (ledger.evidence_s, ledger.stop_s) == (0.2, 0.3)
    assert ledger.rendezvous_s == pytest.approx(0.5)
    assert (ledger.start_s, ledger.restore_s, ledger.first_step_s) == (2, 1.5, 2.5)
    assert ledger.wall_s == pytest.approx(7.5)


@pytest.mark.parametrize("is_early", [False, True], ids=["all run", "its peers still start"])
def test_where_ranks_keep_their_states_the_incident_tells_what_became_of_all(
    *, is_early: bool
) -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n1", "rank_exited", rank=5, exit_code=1, step=40)
    world.back("n0", "n1")
    world.tick(60)
    told = {"heal_s": 0.5, "healed": "rank 5 was replaced, 7 kept their state"}
    world.report("n0", "started")
    if is_early:
        world.report("n0", "first_step", step=41, **told)
        world.tick(2)
    world.report("n1", "started")
    if not is_early:
        world.tick(2)
        world.report("n0", "first_step", step=41, **told)
    closed = world.of(IncidentClosed)[0]
    assert closed.reason == (
        "n1 rank_exited; rank 5 was replaced, 7 kept their state, 0 steps lost; "
        "round 2 has made its first step"
    )
    assert closed.lost_steps == 0
    if not is_early:  # else the time until all ranks ran has the state's in it
        assert (closed.ledger.heal_s, closed.ledger.first_step_s) == (0.5, 1.5)
    world.report("n1", "rank_exited", rank=5, exit_code=1, step=43)
    world.back("n0", "n1")
    world.run()
    assert "kept" not in world.of(IncidentClosed)[1].reason, "all of its ranks started anew"


@pytest.mark.parametrize(
    ("first", "lost"), [(41, "0 steps lost"), (40, "1 step lost"), (38, "3 steps lost"), (None, "")]
)
def test_a_fall_back_to_an_image_tells_the_steps_that_it_cost(first: int | None, lost: str) -> None:
    world = World(spec(1)).started("n0")
    world.report("n0", "rank_exited", exit_code=1, step=40)
    world.back("n0")
    world.report("n0", "started")
    healed = "rank 5 was replaced, all went back to step 37"
    world.report("n0", "first_step", step=first, healed=healed)
    told = f"{healed}{', ' if lost else ''}{lost}; round 2 has made"
    assert told in world.of(IncidentClosed)[0].reason


@pytest.mark.parametrize("ends", ["its ranks have run for long", "every rank has finished"])
def test_a_training_that_shows_no_steps_was_back_when_its_first_collective_began(
    ends: str,
) -> None:
    world = World(spec(2)).started("n0", "n1")
    world.report("n0", "rank_exited", exit_code=1, last_progress_age_s=1.0, age_s=0.25)
    world.back("n0", "n1", evidence_s=0.0, stop_s=0.0)
    world.tick(60)
    world.run(stepped=False)
    world.tick(2.0)
    world.report("n0", "first_collective", last_progress_age_s=1.5)
    if ends == "every rank has finished":
        world.tick(30)
        world.report("n0", "finished")
        world.report("n1", "finished")
    else:
        world.tick(400)
    [opened], [closed] = world.of(IncidentOpened), world.of(IncidentClosed)
    assert closed.reason.startswith(f"{opened.reason}; "), (
        "what happened is told, and what followed"
    )
    ledger = closed.ledger
    assert (ledger.unfinished_s, ledger.detect_s) == (0.75, 0.25)
    assert ledger.first_step_s == pytest.approx(0.5)
    assert ledger.other_s == 0.0


@pytest.mark.parametrize("stopped_while", ["it starts", "it runs", "it ends", "nodes are missing"])
def test_a_job_that_is_stopped_before_a_step_books_no_first_step(stopped_while: str) -> None:
    """A4.6: nothing says that a step was made, or a decision awaited, which was not."""
    world = World(spec(2)).started("n0", "n1")
    began = world.now
    world.report("n0", "rank_exited", exit_code=1)
    if stopped_while != "it ends":
        world.back("n0", evidence_s=0.5, stop_s=0.25)
        world.tick(1)
    if stopped_while == "nodes are missing":
        world.leave("n1")
        world.tick(60)
    elif stopped_while != "it ends":
        world.back("n1")
        if stopped_while == "it runs":
            world.run(stepped=False)
    world.tick(8)
    world.apply(StopJob(job="j", by="ann", reason="enough", save_first=False))
    [closed] = world.of(IncidentClosed)
    ledger = closed.ledger
    assert closed.outcome == "stopped"
    assert ledger.wall_s == pytest.approx(world.now - began)
    assert ledger.first_step_s == ledger.other_s == 0.0
    entry = {"it starts": "start_s", "it runs": "no_step_s", "it ends": "stop_s",
             "nodes are missing": "rendezvous_s"}[stopped_while]  # fmt: skip
    assert getattr(ledger, entry) >= 8
    assert (
        sum(getattr(ledger, it) for it in ("decide_s", "start_s", "no_step_s") if it != entry) < 1
    )


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_second_failure_before_the_first_step_belongs_to_the_same_incident(repeats: int) -> None:
    world = World(spec(2)).started("n0", "n1")
    began = world.now
    world.report("n0", "rank_exited", exit_code=1, last_progress_age_s=0.5)
    for _ in range(repeats):
        world.tick(1)
        world.back("n0", "n1", evidence_s=0.2, stop_s=0.3)
        world.tick(60)
        world.run(stepped=False)
        world.tick(2)
        world.report("n1", "rank_exited", exit_code=1)
    world.back("n0", "n1")
    world.tick(400)
    world.run()
    closed = world.of(IncidentClosed)
    assert len(world.of(IncidentOpened)) == len(closed) == 1
    assert closed[0].ledger.wall_s == pytest.approx(world.now - began + 0.5)
    assert closed[0].ledger.unfinished_s == 0.5
    assert closed[0].next_round == world.doc.round
