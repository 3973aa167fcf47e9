"""Who is lost and who is back, whatever happens: in time, once, and the same to all observers."""

from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep_services.health.domain.findings import NodeLoss, NodeReturn
from tests.unit.health.fleet import SETTINGS, World, beat, first_loss

QUICK_S = SETTINGS.hailed_limit_s - 0.55
LATEST_S = SETTINGS.silence_limit_s + 2 * SETTINGS.tick_s


# -- found -----------------------------------------------------------------------------------


def test_a_node_that_is_heard_is_not_lost() -> None:
    world = World(4, slots=2)
    world.run(60)
    assert world.found == []


def test_a_silent_spare_is_lost_once_with_the_numbers_and_in_time() -> None:
    world = World(4)
    world.run(10)
    world.silent = {"n3"}
    began = world.now
    world.run(60)
    assert world.lost == ["n3"]
    assert SETTINGS.silence_limit_s - 1 <= world.found[0][0] - began <= LATEST_S
    loss = first_loss(world)
    assert 3.0 <= loss.silence_s <= 3.5
    assert (loss.limit_s, loss.blind_s) == (3.0, 0.0)
    assert loss.reason.startswith(f"n3 has been silent for {loss.silence_s:.1f} s (limit 3 s); ")
    assert "its last beat: standby" in loss.reason
    assert " was heard 0." in loss.reason


def test_a_silent_member_is_lost_once_the_training_stands_still() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent, world.is_moving = {"n1"}, False
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= SETTINGS.hailed_limit_s
    loss = first_loss(world)
    assert loss.limit_s == QUICK_S
    assert "round 1, slot 1" in loss.reason
    assert "times for a beat" in loss.reason
    assert "have not moved for 1." in loss.reason
    assert loss.last_step is not None


@pytest.mark.parametrize(
    ("silent", "changes"),
    [
        ({"n1"}, {"late_s": 0.2}),
        ({"n1", "n2"}, {}),
        ({"n1"}, {"state": "stopping"}),
        ({"n1"}, {"state": "starting"}),
    ],
    ids=["it was late", "others are silent, too", "agents stop ranks", "agents start ranks"],
)
def test_a_node_whose_silence_does_not_stand_out_has_the_longer_limit(
    silent: set[str], changes: dict[str, object]
) -> None:
    world = World(4, slots=4)
    world.changes = changes
    world.run(10)
    world.silent, world.is_moving = silent, False
    world.run(20)
    assert set(world.lost) == silent
    assert first_loss(world).limit_s == SETTINGS.hailed_limit_s


def test_nodes_are_asked_as_soon_as_their_round_stands_and_once() -> None:
    """Those that answer are alive: they are not asked again before they fall silent."""
    world = World(20, slots=20)
    world.run(10)
    assert world.hails == 0
    world.is_moving = False
    world.run(10)
    assert 0 < world.hails <= 20
    assert world.found == []


def test_a_pause_of_the_observer_does_not_make_steps_look_longer() -> None:
    worlds = [World(20, slots=20) for _ in range(2)]
    for world in worlds:
        world.step_s = 0.5
        world.run(10)
    worlds[1].reads = False
    worlds[1].run(0.3)
    worlds[1].reads = True
    worlds[0].run(0.3)
    for world in worlds:
        world.run(2)
        world.silent, world.is_moving = {"n1"}, False
        world.run(5)
    assert worlds[0].found == worlds[1].found


def test_a_loss_is_known_until_the_node_is_heard_or_its_job_has_gone_on_without_it() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent, world.is_moving = {"n1"}, False
    world.run(60)
    assert world.fleet.still_lost() == [first_loss(world)]
    world.round = 2
    world.run(2)
    assert world.fleet.still_lost() == []

    world.round, world.silent = 1, {"n3"}
    world.run(60)
    assert [loss.beat.node for loss in world.fleet.still_lost()] == ["n3"]
    world.silent = set()
    world.run(2)
    assert world.fleet.still_lost() == []


def test_whose_beats_are_lost_is_asked_and_is_not_lost() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.mute, world.is_moving = {"n1", "n3"}, False
    world.run(60)
    assert world.found == []
    assert world.hails > 0


def test_while_beats_wait_to_be_read_nobody_is_lost_and_the_time_does_not_count() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.is_moving = False
    for _ in range(80):
        world.now += SETTINGS.tick_s
        read_at = world.now - SETTINGS.pause_most_s - 1.1 * SETTINGS.tick_s
        assert world.fleet.judge(world.now, is_blind=False, read_at=read_at) == []
        assert world.fleet.hails(world.now) == []
    assert world.fleet.blind_s == pytest.approx(80 * SETTINGS.tick_s)
    world.silent = {"n1"}
    began = world.now
    world.run(10)
    assert world.lost == ["n1"]
    assert world.found[0][0] - began <= SETTINGS.hailed_limit_s + 1


def test_nodes_behind_servers_that_were_not_reached_have_time_to_come_back() -> None:
    """Their silence began before health knew that it could not hear them."""
    world = World(4, slots=3)
    world.run(10)
    world.silent, world.is_moving = {"n1", "n2"}, False
    world.run(SETTINGS.hailed_limit_s - 1)
    world.fleet.come_back()
    world.run(SETTINGS.silence_limit_s)
    assert world.lost == []
    world.silent = {"n2"}
    world.run(SETTINGS.reconnect_grace_s)
    assert world.lost == ["n2"]


@pytest.mark.parametrize("answers", [True, False])
def test_a_question_counts_once_its_answer_would_have_been_read(answers: bool) -> None:
    """As a slow observer saw it: the answers were there, behind thousands of beats."""
    world = World(20, slots=3)
    world.run(10)
    world.is_moving = False
    world.run(1)
    world.silent = {"n1"}
    while silence_s(world, "n1") < 1.5:
        world.run(world.settings.tick_s)
    world.reads = False
    if answers:
        world.silent, world.mute = set(), {"n1"}
    while silence_s(world, "n1") < SETTINGS.hailed_limit_s:
        world.run(world.settings.tick_s)
    assert (world.found, world.fleet.blind_s) == ([], 0.0)
    assert world.hails >= 5
    world.reads = True
    world.run(2 * world.settings.tick_s)
    assert world.lost == ([] if answers else ["n1"])


def test_nobody_is_asked_while_the_training_moves() -> None:
    world = World(4, slots=4)
    world.run(10)
    world.silent = {"n1"}
    world.run(60)
    assert (world.found, world.hails) == ([], 0)


def test_a_spare_that_does_not_answer_has_the_longer_limit() -> None:
    world = World(4, slots=3)
    world.run(10)
    world.silent = {"n3"}
    world.run(10)
    loss = first_loss(world)
    assert (loss.beat.node, loss.limit_s) == ("n3", SETTINGS.silence_limit_s)
    assert world.hails > 0


def test_one_that_is_heard_again_has_returned_and_can_be_lost_again() -> None:
    world = World(4)
    world.run(5)
    world.silent = {"n2"}
    world.run(10)
    world.silent = set()
    world.run(5)
    world.silent = {"n2"}
    world.run(10)
    losses = [one for _, one in world.found if isinstance(one, NodeLoss)]
    (back,) = (one for _, one in world.found if isinstance(one, NodeReturn))
    assert [type(one) for _, one in world.found] == [NodeLoss, NodeReturn, NodeLoss]
    assert back.loss == losses[0].id
    assert losses[0].id != losses[1].id
    assert 9 <= back.away_s <= 11
    assert "its agent ran on" in back.reason


@pytest.mark.parametrize(
    ("sequence", "said"),
    [(1, "started again"), (52, "was paused: it sent 1 beats in"), (80, "ran on: 29 beats")],
)
def test_a_return_says_what_became_of_the_agent(sequence: int, said: str) -> None:
    world = World(2)
    world.fleet.hear(beat("x", 50), world.now)
    world.run(30)
    assert world.lost == ["x"]
    back = world.fleet.hear(beat("x", sequence), world.now)
    assert back is not None
    assert said in back.reason


@pytest.mark.parametrize(
    ("load", "said"),
    [
        ({"load_ratio": 5.2}, "5.2 tasks for each processor of x"),
        ({"late_s": 0.7}, "x had sent beats up to 0.7 s late"),
        ({"load_ratio": 1.5, "late_s": 0.1}, ""),
    ],
)
def test_the_loss_of_an_overloaded_node_says_so(load: dict[str, float], said: str) -> None:
    world = World(2)
    world.fleet.hear(replace(beat("x", 50), **load), world.now)
    world.run(30)
    assert first_loss(world).overload == said


def silence_s(world: World, node: str) -> float:
    return world.fleet.silences("j", world.now)[node][0]


# -- two observers ---------------------------------------------------------------------------


def test_two_observers_make_one_fact() -> None:
    one, other = World(4), World(4)
    for world in (one, other):
        world.now += 17.3 if world is other else 0
        world._next = {name: world.now + world._phase[name] for name in world.names}
        world.run(10)
        world.silent = {"n1"}
        world.run(10)
        world.silent = set()
        world.run(3)
    assert [one.id for _, one in one.found] == [one.id for _, one in other.found]
    assert all(len(found.id) == 32 for _, found in one.found)
    assert len({found.id for _, found in one.found}) == 2


def test_an_agent_that_counts_from_the_start_again_is_not_taken_for_the_old_one() -> None:
    ids = set()
    for day in (1, 2):
        world = World(2)
        at = datetime(2026, 1, day, tzinfo=UTC)
        world.fleet.hear(beat("x", 5, at=at), world.now)
        world.run(10)
        ids.add(first_loss(world).id)
    assert len(ids) == 2


# -- whatever happens ------------------------------------------------------------------------

SCENES = st.lists(
    st.tuples(
        st.floats(0.25, 30),
        st.sets(st.sampled_from(["n0", "n1", "n2", "n3"]), max_size=4),
        st.booleans(),
        st.booleans(),
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(SCENES)
def test_no_finding_while_blind_and_none_of_a_member_while_the_others_move(
    scenes: list[tuple[float, set[str], bool, bool]],
) -> None:
    """Random scenes of silence, blindness and progress (A15.2)."""
    world = World(4, slots=3)
    for lasts_s, silent, is_blind, is_moving in scenes:
        world.silent, world.is_blind, world.is_moving = silent, is_blind, is_moving
        members_heard = {"n0", "n1", "n2"} - silent
        before = len(world.found)
        began = world.now
        world.run(lasts_s)
        new = [(at, found) for at, found in world.found[before:] if isinstance(found, NodeLoss)]
        if is_blind:
            assert new == []
        for at, found in new:
            assert found.silence_s >= found.limit_s
            others = members_heard - {found.beat.node}
            if is_moving and others and found.beat.slot is not None:
                assert at - began <= 1.5  # of what was before: the first beats that tell


@settings(max_examples=60, deadline=None)
@given(SCENES, st.sampled_from(["n0", "n1", "n2", "n3"]))
def test_whatever_was_before_a_silent_node_is_found_in_time(
    scenes: list[tuple[float, set[str], bool, bool]], victim: str
) -> None:
    world = World(4, slots=3)
    for lasts_s, silent, is_blind, is_moving in scenes:
        world.silent, world.is_blind, world.is_moving = silent, is_blind, is_moving
        world.run(lasts_s)
    world.silent, world.is_blind, world.is_moving = set(), False, True
    world.run(300)  # all is well again, and unusual steps are forgotten
    world.found.clear()
    world.silent, world.is_moving = {victim}, False
    began = world.now
    world.run(10)
    assert world.lost == [victim]
    assert world.found[0][0] - began <= LATEST_S


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0.3, 100), st.booleans()), max_size=20))
def test_an_observer_that_stumbles_harms_nobody_who_is_well(
    stumbles: list[tuple[float, bool]],
) -> None:
    world = World(4, slots=3)
    for lasts_s, is_cut_off in stumbles:
        world.is_blind = is_cut_off
        (world.run if is_cut_off else world.sleep)(lasts_s)
        world.is_blind = False
        world.run(1.25)
    assert world.found == []
