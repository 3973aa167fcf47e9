"""A rank that has stalled: who is asked for an excuse, and what becomes of its round."""

from datetime import timedelta
from typing import Any

import pytest

from everstep.incident_causes import CONSEQUENCE, PLAIN, WAITS
from everstep.messages import (
    ActionDecided,
    ActionTaken,
    CollectEvidence,
    IncidentClosed,
    IncidentOpened,
    NameExcuse,
    Reported,
    RestartJob,
    RoundEnded,
    StallLocated,
    StopRanks,
)
from everstep.messages.orders import GroupPosition
from everstep_services.rendezvous.domain.events import JobControl
from tests.unit.rendezvous.world import WALL, World, spec


def running(nodes: int = 2) -> World:
    """A round that has run for long enough that every agent is heard."""
    world = World(spec(nodes), stall_excuse_s=0.5).started(*(f"n{one}" for one in range(nodes)))
    world.tick(60)
    return world


def stall(
    world: World, node: str = "n1", rank: int = 2, waited_s: float = 40.0, **more: Any
) -> Reported:
    fact = f"{rank:032x}"
    return world.report(node, "rank_stalled", rank=rank, waited_s=waited_s, fact=fact, **more)


OF_HALF = GroupPosition(group="half", entered=3)


def excuse(world: World, node: str, rank: int, for_s: float) -> None:
    world.report(node, "excused", rank=rank, excuse_s=for_s, reason="rank 0 saves")


def asked(world: World) -> list[NameExcuse]:
    return [order for _, order in world.orders if isinstance(order, NameExcuse)]


def test_a_stall_without_an_excuse_ends_the_round_when_others_had_the_time_to_name_one() -> None:
    world = running()
    stall(world, entered=17, entered_in=(OF_HALF,))
    (question,) = asked(world)
    assert (question.node, question.rank, question.waited_s) == ("n1", 2, 40.0)
    assert (question.entered, question.entered_in) == (17, (OF_HALF,))
    world.tick(0.45)
    assert world.doc.phase == "running"
    world.tick(0.1)
    assert world.doc.phase == "ending"
    assert [(ended.cause, ended.rank) for ended in world.of(RoundEnded)] == [("rank_stalled", 2)]
    assert world.doc.incident is not None
    assert world.doc.incident.ledger.detect_s == 40.5
    assert world.doc.stalls == ()


def test_the_question_is_asked_twice_for_one_may_be_lost() -> None:
    world = running()
    stall(world)
    world.tick(0.3)
    assert len(asked(world)) == 2
    assert {question.id for question in asked(world)} == {world.doc.stalls[0].id}


def test_a_single_node_has_nobody_to_ask() -> None:
    world = running(1)
    stall(world, "n0", 0)
    assert world.doc.phase == "ending"
    assert asked(world) == []


def test_about_a_rank_that_a_signal_holds_nobody_is_asked() -> None:
    world = running()
    stall(world, waited_s=4.0, is_stopped=True)
    assert (world.doc.phase, asked(world)) == ("ending", [])


def test_an_excused_stall_ends_nothing_as_long_as_the_excuse_is_renewed() -> None:
    world = running()
    stall(world)
    for _ in range(20):
        world.tick(0.1)
        excuse(world, "n0", 2, 600)
        world.tick(5.0)
        assert world.doc.phase == "running"
    world.report("n1", "rank_recovered", rank=2)
    world.tick(100)
    assert (world.doc.phase, world.doc.stalls) == ("running", ())


def test_when_the_excuse_is_over_it_is_asked_for_again() -> None:
    world = running()
    stall(world)
    excuse(world, "n0", 2, 3.0)
    world.tick(2.9)
    assert len(asked(world)) == 1
    world.tick(0.2)
    assert len(asked(world)) == 2
    world.tick(0.5)
    assert world.doc.phase == "ending"


def test_no_excuse_holds_for_long_without_being_asked_for_again() -> None:
    world = running()
    stall(world)
    excuse(world, "n0", 2, 7200)
    world.tick(5.6)
    assert world.doc.phase == "ending"


def test_a_rank_that_stalls_again_is_asked_about_again() -> None:
    """The second stall begins its wait anew (A3.4, A15.2)."""
    world = running()
    stall(world)
    world.report("n1", "rank_recovered", rank=2)
    world.tick(10)
    stall(world)
    assert len({question.id for question in asked(world)}) == 2
    assert world.doc.phase == "running"


def test_a_stall_that_is_said_again_changes_nothing() -> None:
    world = running()
    stall(world)
    excuse(world, "n0", 2, 60)
    before = world.doc.stalls
    stall(world, waited_s=50)
    assert world.doc.stalls == before


def test_how_far_a_stalled_rank_has_come_may_be_known_later_and_is_asked_about_anew() -> None:
    """A3.3: a rank that waits for it in a collective had excused it without knowing that."""
    world = running()
    stall(world)
    excuse(world, "n0", 2, 60)
    world.tick(1)
    assert world.doc.phase == "running"
    stall(world, waited_s=41, entered_in=(OF_HALF,))
    assert asked(world)[-1].entered_in == (OF_HALF,)
    world.tick(0.6)
    assert world.doc.phase == "ending"


def test_an_excuse_for_another_rank_is_none() -> None:
    world = running()
    stall(world)
    excuse(world, "n0", 3, 60)
    world.tick(0.6)
    assert world.doc.phase == "ending"


def test_of_several_stalls_the_one_that_has_waited_longest_is_the_cause() -> None:
    world = running()
    stall(world, "n0", 1, waited_s=30)
    stall(world, "n1", 2, waited_s=45)
    world.tick(1)
    (opened,) = world.of(IncidentOpened)
    assert opened.rank == 2
    assert world.doc.incident is not None
    assert world.doc.incident.reports == 2


def test_a_stall_with_an_excuse_is_not_the_cause_of_another() -> None:
    """It has waited longer, but for a rank that is busy."""
    world = running()
    stall(world, "n1", 2, waited_s=45)
    excuse(world, "n0", 2, 5.0)
    stall(world, "n0", 1, waited_s=5)
    world.tick(1)
    assert [(ended.cause, ended.rank) for ended in world.of(RoundEnded)] == [("rank_stalled", 1)]
    assert world.doc.incident is not None
    assert world.doc.incident.reports == 1


def test_a_replica_that_takes_over_asks_itself_and_first_lets_agents_come_back() -> None:
    world = running()
    stall(world)
    world.take_over()
    world.apply()
    world.tick(4.9)
    assert (len(asked(world)), world.doc.phase) == (1, "running")
    world.tick(0.2)
    assert (len(asked(world)), world.doc.phase) == (2, "running")
    world.tick(0.5)
    assert world.doc.phase == "ending"


def test_a_rank_that_waits_for_others_is_not_named_if_another_has_stalled_too() -> None:
    """As in a pipeline: the neighbours of the rank that hangs pass their limits first."""
    world = running()
    stall(world, "n1", 2, 6.0, fingerprint=WAITS)
    stall(world, "n0", 1, 5.9)
    world.tick(0.5)
    assert world.doc.phase == "ending"
    assert reasons(world) == ["n0 rank_stalled"]


def test_a_stall_of_a_rank_that_waits_is_corrected_once_by_that_of_one_that_does_not() -> None:
    world = running()
    stall(world, "n1", 2, 6.0, fingerprint=WAITS)
    world.tick(0.5)
    (first,) = [order for _, order in world.orders if isinstance(order, StopRanks)]
    assert first.cause_within_s > 0, "agents show it once the better cause had time to come"
    stall(world, "n0", 1, 6.0)
    stall(world, "n0", 0, 6.0, fingerprint=WAITS)
    assert reasons(world) == ["n1 rank_stalled", "n0 rank_stalled"]


LOCATED = "rank 0 on n0 made its last step, 7, before all others; 3 others wait"


def locate(world: World, *, is_certain: bool = True, round: int = 1) -> None:
    """Health has seen where the stall began."""
    finding = StallLocated(
        id="e" * 32, job="j", at=WALL, source="health", round=round, first_ranks=(0,),
        nodes=("n0",), waiting_ranks=3, is_certain=is_certain, reason=LOCATED,
    )  # fmt: skip
    world.apply(finding)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rank_that_waits_is_not_named_once_health_has_located_the_stall(
    *, is_first: bool
) -> None:
    world = running()
    if is_first:
        locate(world)
    stall(world, "n1", 2, 6.0, fingerprint=WAITS)
    world.tick(0.5)
    if not is_first:
        locate(world)
    assert world.doc.phase == "ending"
    assert reasons(world)[-1] == LOCATED
    incident = world.doc.incident
    assert incident is not None
    assert (incident.node, incident.rank, incident.trigger_fact) == ("n0", 0, "e" * 32)
    locate(world)
    assert reasons(world)[-1] == LOCATED


@pytest.mark.parametrize("how", ["vague", "of another round", "of the same rank", "not waiting"])
def test_what_health_has_located_replaces_no_better_cause(how: str) -> None:
    world = running()
    rank, fingerprint = (0 if how == "of the same rank" else 2), WAITS
    stall(world, "n1", rank, 6.0, fingerprint="" if how == "not waiting" else fingerprint)
    world.tick(0.5)
    locate(world, is_certain=how != "vague", round=2 if how == "of another round" else 1)
    assert reasons(world) == ["n1 rank_stalled"]


def test_the_report_of_a_stall_is_answered_with_the_best_known_reason() -> None:
    """Agents show it to whoever has read of a rank that waits."""
    world = running()
    world.control = BRAKED

    def answer() -> tuple[str, int]:
        reply = stall(world, "n1", 2, 6.0, fingerprint=WAITS)
        return reply.cause, reply.weight

    assert answer() == ("", 0)
    excuse(world, "n0", 2, 60)
    assert answer() == ("rank 0 saves", CONSEQUENCE)
    locate(world, is_certain=False)
    assert answer() == (LOCATED, CONSEQUENCE)
    locate(world)
    assert answer() == (LOCATED, PLAIN)
    own = stall(world, "n0", 0, 6.0)
    assert (own.cause, own.weight) == ("", 0), "it is the reason itself"
    world.tick(1)
    assert answer() == ("n0 rank_stalled", PLAIN)
    assert world.doc.incident is not None
    assert world.doc.incident.rank == 0


def reasons(world: World) -> list[str]:
    """The reasons of the orders to stop, each once."""
    orders = [order for _, order in world.orders if isinstance(order, StopRanks)]
    return list(dict.fromkeys(order.reason for order in orders))


def test_the_brake_that_comes_while_others_are_asked_holds() -> None:
    """A stall ends no round once the brake is on (A15.4)."""
    world = running()
    stall(world)
    world.control = JobControl(is_braked=True)
    world.tick(5)
    assert (world.doc.phase, world.doc.stalls) == ("running", ())


BRAKED = JobControl(is_braked=True)
WATCHED: Any = [
    pytest.param(BRAKED, {}, id="brake"),
    pytest.param(JobControl(modes={"restart": "observe"}), {}, id="modes.restart"),
    pytest.param(JobControl(), {"is_fatal": False}, id="--no-restart-on-stall"),
]


@pytest.mark.parametrize(("control", "more"), WATCHED)
def test_a_stall_that_ends_no_round_is_an_incident_until_its_ranks_move(
    control: JobControl, more: dict[str, Any]
) -> None:
    world = running()
    world.control = control
    stall(world, "n0", 1, 6.0, fingerprint=WAITS, **more)
    stall(world, "n1", 2, 6.0, **more)
    world.tick(1)
    (opened,) = world.of(IncidentOpened)
    assert (opened.trigger, opened.node, opened.rank) == ("rank_stalled", "n1", 2)
    assert opened.last_progress_at == opened.at - timedelta(seconds=6.5)
    (wanted,) = [order for _, order in world.orders if isinstance(order, CollectEvidence)]
    assert (wanted.incident, wanted.round, wanted.evidence) == (opened.incident, 1, ())
    (decided,), (taken,) = world.of(ActionDecided), world.of(ActionTaken)
    assert (decided.mode, decided.incident, decided.evidence) == (
        "observe", opened.incident, (f"{2:032x}",)
    )  # fmt: skip
    assert (taken.outcome, taken.incident) == ("observed", opened.incident)
    for _ in range(60):  # agents report it again; the round may show no steps for a long time
        stall(world, "n0", 1, 6.0, fingerprint=WAITS, **more)
        stall(world, "n1", 2, 6.0, **more)
        world.tick(10)
    assert (world.doc.phase, len(world.of(ActionDecided))) == ("running", 1)
    assert len(asked(world)) == 4, "nobody is asked about it again"
    assert sum(isinstance(order, CollectEvidence) for _, order in world.orders) == 1
    world.report("n1", "rank_recovered", rank=2, reason="rank 2 moves again")
    assert world.of(IncidentClosed) == [], "rank 1 still stands"
    world.report("n0", "rank_recovered", rank=1, reason="rank 1 moves again", age_s=0.5)
    (closed,) = world.of(IncidentClosed)
    assert (closed.incident, closed.outcome) == (opened.incident, "recovered")
    assert (closed.lost_steps, closed.next_round) == (0, 1)
    assert closed.reason == "n1 rank_stalled; rank 1 moves again"
    assert closed.ledger.detect_s == pytest.approx(6.5)
    assert closed.ledger.other_s == pytest.approx(600, abs=0.6)
    assert (world.doc.incident, world.of(RoundEnded)) == (None, [])


@pytest.mark.parametrize(("control", "more"), WATCHED)
def test_an_excused_stall_is_no_incident_where_stalls_only_observe(
    control: JobControl, more: dict[str, Any]
) -> None:
    world = running()
    world.control = control
    stall(world, **more)
    excuse(world, "n0", 2, 60)
    world.tick(1)
    world.report("n1", "rank_recovered", rank=2)
    assert (world.of(IncidentOpened), world.of(ActionDecided)) == ([], [])


def standing() -> World:
    """A rank has stood still for a minute, under the brake."""
    world = running()
    world.control = BRAKED
    stall(world, waited_s=6.0)
    world.tick(60)
    return world


def test_the_incident_of_ranks_that_stand_goes_on_with_the_end_of_their_round() -> None:
    world = standing()
    world.report("n0", "rank_exited", rank=0, exit_code=1)
    world.back("n0", "n1")
    world.tick(1)
    world.run()
    (closed,) = world.of(IncidentClosed)
    assert (closed.trigger, closed.rank, closed.next_round) == ("rank_stalled", 2, 2)
    assert closed.ledger.wall_s == pytest.approx(67.5, abs=1.5)
    assert len(world.of(IncidentOpened)) == 1


def test_once_the_brake_is_off_the_round_of_a_rank_that_stands_ends() -> None:
    world = standing()
    world.control = JobControl()
    stall(world, waited_s=66.0)
    world.tick(1)
    assert world.doc.phase == "ending"
    assert len(world.of(IncidentOpened)) == 1


def test_a_person_who_restarts_ranks_that_stand_costs_no_restart() -> None:
    world = standing()
    world.apply(RestartJob(job="j", round=1, reason="it hangs", by="ann"))
    world.back("n0", "n1")
    world.tick(5)
    world.run()
    (closed,) = world.of(IncidentClosed)
    assert (closed.trigger, closed.outcome, world.doc.restarts) == ("rank_stalled", "recovered", 0)


def test_a_job_that_is_done_while_a_rank_stands_has_no_open_incident() -> None:
    world = standing()
    for node in ("n0", "n1"):
        world.report(node, "finished")
    (closed,) = world.of(IncidentClosed)
    assert (closed.outcome, closed.lost_steps) == ("recovered", 0)


def test_many_stalls_fit_into_the_document() -> None:
    world = running()
    for rank in range(100):
        stall(world, rank=rank)
    assert len(world.doc.stalls) == 16


def test_not_all_ranks_of_a_large_job_are_asked_about_while_they_stand() -> None:
    world = running()
    world.control = BRAKED
    for _ in range(10):
        for rank in range(100):
            stall(world, rank=rank)
        world.tick(10)
    assert world.doc.incident is not None
    assert len(world.doc.incident.stalled) == 16
    assert len(asked(world)) == 32
