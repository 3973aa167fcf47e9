"""Who is not lost, although silent: each reason against it, one by one."""

import pytest
from msgspec.structs import replace

from everstep.messages import RankBeat
from everstep_services.health.domain.findings import NodeLoss
from tests.unit.health.fleet import SETTINGS, World, beat, first_loss, ranks

LATEST_S = SETTINGS.silence_limit_s + 2 * SETTINGS.tick_s


def test_a_silent_member_is_not_lost_while_the_others_train_on() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent = {"n1"}
    world.run(600)
    assert world.found == []
    world.is_moving = False
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= LATEST_S


def test_a_training_with_long_steps_is_given_the_time_of_one_and_a_half() -> None:
    world = World(4, slots=3)
    world.step_s = 20.0
    world.run(100)
    world.silent = {"n1"}
    world.run(300)
    assert world.found == []
    world.is_moving = False
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert 9 <= world.found[0][0] - began <= 30 + 1


def test_progress_of_the_silent_node_itself_proves_nothing() -> None:
    world = World(3, slots=1)  # one in the round, two spares
    world.step_s = 20.0
    world.run(100)
    world.silent, world.is_moving = {"n0"}, False
    began = world.now
    world.run(20)
    assert world.lost == ["n0"]
    assert world.found[0][0] - began <= LATEST_S


def second_of_two(world: World, second: int, shown: tuple[RankBeat, ...]) -> None:
    """Of a round of two nodes: `a` is silent from the fifth second on; `b` shows its ranks."""
    member = {"state": "running", "round": 1}
    if second < 5:
        world.fleet.hear(beat("a", second, slot=0, **member), world.now)
    world.fleet.hear(beat("b", second, slot=1, ranks=shown, **member), world.now)
    world.run(1)


@pytest.mark.parametrize("state", ["exited", "stalled", "starting", "something new"])
def test_ranks_that_do_not_run_prove_nothing(state: str) -> None:
    world = World(3)
    for second in range(20):
        second_of_two(world, second, ranks(second, 0.01, state))
    assert world.lost == ["a"]


def test_a_beat_that_knows_of_no_progress_proves_nothing() -> None:
    world = World(3)
    for second in range(20):
        second_of_two(world, second, ranks(None))
    assert world.lost == ["a"]


def test_steps_and_collectives_that_are_finished_prove_it_without_an_age() -> None:
    world = World(3)
    for second in range(40):
        second_of_two(world, second, ranks(min(second, 20)))
        assert world.lost == ([] if second < 21 else ["a"] if second > 24 else world.lost)


@pytest.mark.parametrize("nodes", [1, 2, 3, 10])
def test_when_all_fall_silent_the_bus_is_blamed_first(nodes: int) -> None:
    """Silence of all nodes has a longer limit (A15.2): they may be cut off, and train on."""
    world = World(nodes)
    world.run(10)
    world.silent = set(world.names)
    began = world.now
    world.run(SETTINGS.all_cut_off_limit_s - 1.5)
    assert world.found == []
    world.run(60)
    assert sorted(world.lost) == sorted(world.names)
    assert SETTINGS.all_cut_off_limit_s - 1 <= world.found[0][0] - began
    assert world.found[-1][0] - began <= SETTINGS.all_cut_off_limit_s + 2 * SETTINGS.tick_s
    reason = first_loss(world).reason
    assert "no node of its job is heard" in reason
    assert "have not moved" not in reason  # nobody was heard who could tell


@pytest.mark.parametrize("nodes", [1, 3])
def test_when_all_agents_are_gone_their_nodes_are_lost_sooner(nodes: int) -> None:
    world = World(nodes)
    world.run(10)
    world.killed = set(world.names)
    world.run(SETTINGS.all_silent_limit_s - 1.5)
    assert world.found == []
    world.run(3)
    assert sorted(world.lost) == sorted(world.names)


def test_other_jobs_are_no_witnesses() -> None:
    world = World(5)
    world.fleet.hear(beat("alone", 1, job="other"), world.now)
    world.run(SETTINGS.all_silent_limit_s - 1)
    assert world.found == []
    world.run(2)
    assert world.lost == ["alone"]


def test_nobody_is_lost_while_the_observer_is_cut_off() -> None:
    """Ten minutes without the bus, and no node is lost (A15.2)."""
    world = World(4)
    world.run(10)
    world.is_blind = True
    world.run(600)
    assert world.found == []
    world.is_blind = False
    world.run(30)
    assert world.found == []


def test_who_has_not_come_back_after_the_bus_did_has_more_time() -> None:
    world = World(4)
    world.run(10)
    world.is_blind = True
    world.silent = {"n1"}
    world.run(60)
    world.is_blind = False
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert 12 - 1 <= world.found[0][0] - began <= 13 + 0.5
    loss = first_loss(world)
    assert loss.limit_s == 13
    assert 59 <= loss.blind_s <= 61
    assert "in which health was blind" in loss.reason


def test_an_observer_that_was_stopped_finds_nobody_lost_when_it_wakes() -> None:
    """Ten minutes of SIGSTOP, and no node is lost (A15.2)."""
    world = World(4)
    world.run(10)
    world.sleep(600)
    assert world.fleet.judge(world.now, is_blind=False) == []
    world.run(30)
    assert world.found == []
    assert 600 <= world.fleet.blind_s <= 601
    world.silent = {"n1"}
    began = world.now
    world.run(10)
    assert world.lost == ["n1"]  # as soon as before
    assert world.found[0][0] - began <= LATEST_S


def test_after_a_short_pause_it_is_only_heard_first_what_was_said_meanwhile() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent, world.is_moving = {"n1"}, False
    began = world.now
    world.run(1.5)
    world.sleep(0.3)
    assert world.fleet.judge(world.now, is_blind=False) == []
    assert world.fleet.hails(world.now) == []
    assert world.fleet.blind_s == 0
    world.run(3)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= SETTINGS.hailed_limit_s + 2 * SETTINGS.tick_s


def test_after_a_pause_all_are_judged_as_soon_as_what_was_said_meanwhile_has_been_read() -> None:
    world = World(4, slots=3, settings=replace(SETTINGS, tick_s=0.125, pause_most_s=0.4))
    fleet, before_s = world.fleet, world.settings.tick_s
    world.changes = {"late_s": 0.2}
    world.run(10)
    world.silent, world.is_moving = {"n1"}, False
    world.run(2 - 2 * before_s)
    asleep_at = world.now
    world.sleep(0.3)
    woke_at = world.now
    assert fleet.judge(woke_at, is_blind=False, read_at=asleep_at) == []
    assert fleet.tick_s == before_s / 4
    world.now += fleet.tick_s
    assert fleet.judge(world.now, is_blind=False, read_at=asleep_at) == [], "it still waits"
    world.now += fleet.tick_s
    (loss,) = fleet.judge(world.now, is_blind=False, read_at=woke_at)
    assert (loss.beat.node, loss.limit_s, fleet.tick_s) == ("n1", SETTINGS.hailed_limit_s, before_s)


def test_a_beat_that_wakes_the_observer_is_as_new_as_any() -> None:
    world = World(4)
    world.run(10)
    world.sleep(600)
    for name in world.names:
        world.fleet.hear(beat(name, 1000), world.now)
    world.silent = {"n1"}
    began = world.now
    world.run(10)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= LATEST_S


def test_who_says_goodbye_is_forgotten() -> None:
    world = World(4)
    world.run(10)
    world.silent = {"n1"}
    world.fleet.hear(beat("n1", 100, state="leaving"), world.now)
    world.run(60)
    assert world.found == []
    assert world.fleet.counts() == (1, 3, 0)


def test_nobody_waits_for_the_nodes_of_a_job_that_is_over() -> None:
    world = World(4)
    world.run(10)
    world.fleet.end_job("j")
    world.run(5)  # they go on for a little
    world.silent = set(world.names)
    world.run(60)
    assert world.found == []
    assert world.fleet.counts()[1:] == (0, 0)


def test_a_job_that_begins_again_under_its_name_is_watched() -> None:
    world = World(4)
    world.run(10)
    world.fleet.end_job("j")
    world._sequence = dict.fromkeys(world.names, 0)  # other agents
    world.run(10)
    world.silent = {"n1"}
    world.run(10)
    assert world.lost == ["n1"]


def test_a_node_that_is_silent_after_a_newer_round_left_it_behind_is_lost_once() -> None:
    """Rendezvous probes, and replaces a killed node before its silence is long (A2.1)."""
    world = World(4, slots=3)
    world.run(10)
    world.silent = {"n1"}
    world.round = 2
    world.run(60)
    assert world.lost == ["n1"]
    ((_, loss),) = world.found
    assert isinstance(loss, NodeLoss)
    assert loss.is_replaced
    assert "round 2 runs without it" in loss.reason
    assert list(world.fleet._jobs["j"].still_lost()) == [], "rendezvous is not told"


def test_a_node_that_left_before_a_newer_round_is_not_lost() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent = {"n1"}
    world.fleet.hear(beat("n1", 100, state="leaving"), world.now)
    world.round = 2
    world.run(60)
    assert world.found == []


def test_rounds_that_begin_again_are_believed_when_nobody_is_left_in_the_newer_one() -> None:
    world = World(4, slots=3)
    world.round = 7
    world.run(10)
    world.round = 0
    world.run(30)
    world.silent, world.is_moving = {"n1"}, False
    world.run(10)
    assert world.lost == ["n1"]


def test_after_hours_a_node_is_forgotten() -> None:
    world = World(3)
    world.fleet.hear(beat("x", 1, job="old"), world.now)
    world.run(30)
    assert world.fleet.counts() == (2, 3, 1)
    world.fleet.judge(world.now + 0.25, is_blind=False)
    for _ in range(3700):  # an hour, told quickly
        world.run(1)
    assert world.fleet.counts() == (1, 3, 0)


def test_a_node_of_a_new_round_whose_beats_are_lost_is_asked_and_not_lost() -> None:
    world = World(4, slots=4)
    world.run(10)
    world.mute = {"n1"}
    world.round = 2
    world.run(10)
    assert world.found == []
