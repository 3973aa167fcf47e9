"""A node with a connection that closed after its last beat is lost, though others train on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from everstep.messages import NodeBeat
from everstep_services.health.domain.connection_probe import is_alone
from everstep_services.health.domain.findings import NodeLoss
from tests.unit.health.fleet import SETTINGS, World, first_loss

LIMIT_S = SETTINGS.hailed_limit_s + SETTINGS.reconnect_grace_s
LATEST_S = LIMIT_S + 1 + 2 * SETTINGS.tick_s
PROBES_S = 1.0
NAMES = [f"n{number}" for number in range(6)]


def moving() -> World:
    """Six nodes; four of them train, and go on to."""
    world = World(6, slots=4)
    world.run(10)
    return world


def test_a_killed_node_is_lost_though_the_others_train_on() -> None:
    world = moving()
    world.killed = {"n1"}
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert LIMIT_S - 1 <= world.found[0][0] - began <= LATEST_S
    loss = first_loss(world)
    assert (loss.limit_s, loss.beat.slot) == (LIMIT_S, 1)
    assert "its connection to the bus closed after its last beat" in loss.reason
    assert "11 probes over 10.0 s found no subscriber" in loss.reason
    assert " was heard 0." in loss.reason


def test_without_a_time_to_reconnect_it_takes_three_questions() -> None:
    world = World(6, slots=4, settings=replace(SETTINGS, reconnect_grace_s=0.0))
    world.run(10)
    world.killed = {"n1"}
    began = world.now
    world.run(60)
    assert world.lost == ["n1"]
    assert SETTINGS.hailed_limit_s + 2 * PROBES_S - 1 <= world.found[0][0] - began
    assert world.found[0][0] - began <= SETTINGS.hailed_limit_s + 2 * PROBES_S + 2 * SETTINGS.tick_s


@pytest.mark.parametrize("away_s", [1.0, 3.0, 8.0, 10.5])
def test_who_comes_back_within_the_grace_is_not_lost(away_s: float) -> None:
    world = moving()
    for _ in range(5):
        world.killed = {"n1"}
        world.run(away_s)
        world.killed = set()
        world.run(2)
    assert world.found == []


def test_a_connection_that_outlived_its_last_word_proves_nothing_when_it_closes() -> None:
    """A network that is cut, a stopped process: minutes later the server gives up on it."""
    world = moving()
    world.silent = {"n1"}
    world.run(6)
    world.silent, world.killed = set(), {"n1"}
    world.run(600)
    assert world.found == []
    assert world.probes == 1, "and it is not asked again"
    world.killed = set()
    world.run(5)
    world.killed = {"n1"}
    world.run(60)
    assert world.lost == ["n1"], "it was heard since"


def test_nodes_that_fall_silent_together_may_have_lost_one_server() -> None:
    world = moving()
    world.killed = {"n1", "n2"}
    world.run(600)
    assert world.found == []


def test_of_any_jobs() -> None:
    world = moving()
    for second in range(60):
        world.killed = {"n1", "a"} if second else set()
        for slot, node in enumerate(("a", "b")):
            if node not in world.killed:
                word = replace(world.beat_of("n0"), job="k", node=node, slot=slot, sequence=second)
                world.fleet.hear(word, world.now)
        world.run(1)
    assert world.found == [], "a and n1 fell silent together"


def test_those_that_fall_silent_one_after_the_other_are_found_one_after_the_other() -> None:
    world = moving()
    world.killed = {"n1"}
    world.run(5)
    world.killed = {"n1", "n2"}
    world.run(60)
    assert world.lost == ["n1", "n2"]


def test_who_was_not_heard_since_the_bus_came_back_is_not_lost_while_the_others_move() -> None:
    world = moving()
    world.is_blind, world.killed = True, {"n1"}
    world.run(30)
    world.is_blind = False
    world.run(600)
    assert world.found == []


def test_without_a_witness_the_bus_is_to_blame() -> None:
    world = World(4, slots=3)
    world.step_s = 20.0
    world.run(100)
    world.killed = set(world.names)
    world.run(SETTINGS.all_silent_limit_s - 1)
    assert world.found == []


def asked(world: World) -> NodeBeat:
    """The next node to be asked for, and nobody has answered yet."""
    found: list[NodeBeat] = []
    while not found:
        world.now += SETTINGS.tick_s
        world.fleet.judge(world.now, is_blind=False)
        found = world.fleet.probes(world.now)
    return found[0]


def test_an_answer_that_we_may_have_slept_through_is_none() -> None:
    world = moving()
    world.killed = {"n1"}
    world.run(5)
    world.fleet.probed(asked(world), None, world.now + 3)
    world.run(30)
    assert world.lost == ["n1"]


def test_an_answer_about_a_node_that_was_heard_since_is_none() -> None:
    world = moving()
    world.killed = {"n1"}
    world.run(5)
    last = asked(world)
    world.killed = set()
    world.run(2)
    world.killed = {"n1"}
    world.run(5)
    world.fleet.probed(last, None, world.now)
    world.run(30)
    assert world.lost == ["n1"]


# -- whatever happens ------------------------------------------------------------------------

SCENES = st.lists(
    st.tuples(
        st.floats(0.25, 40),
        st.sets(st.sampled_from(NAMES[:4]), max_size=3),
        st.sets(st.sampled_from(NAMES[:4]), max_size=3),
        st.booleans(),
    ),
    min_size=1,
    max_size=10,
)


def losses(world: World, after: int) -> list[tuple[float, str]]:
    found = world.found[after:]
    return [(at, one.beat.node) for at, one in found if isinstance(one, NodeLoss)]


@settings(max_examples=80, deadline=None)
@given(SCENES)
def test_while_the_others_move_only_who_was_closed_all_along_is_lost(
    scenes: list[tuple[float, set[str], set[str], bool]],
) -> None:
    """Never one that was cut off or stopped, nor one of several, nor one that we could not hear."""
    world = moving()
    well_s, cut_off = dict.fromkeys(NAMES, world.now), set[str]()
    for lasts_s, silent, shut, is_blind in scenes:
        killed = shut - silent
        if len(silent | killed) > 3:
            continue
        world.silent, world.killed, world.is_blind = silent, killed, is_blind
        began, before = world.now, len(world.found)
        world.run(lasts_s)
        for at, node in losses(world, before):
            assert not is_blind
            assert node not in cut_off
            assert node in killed or at - began <= 1.25, "before its first beat"
            assert at - well_s[node] >= SETTINGS.reconnect_grace_s
        for name in NAMES:
            if name not in killed:
                well_s[name] = world.now
            if name not in silent | killed:
                cut_off.discard(name)
            elif name in silent and lasts_s >= 4 and not is_blind:
                cut_off.add(name)


@settings(max_examples=60, deadline=None)
@given(SCENES, st.sampled_from(NAMES[:4]))
def test_whatever_was_before_a_killed_node_is_found_in_time_while_the_others_move(
    scenes: list[tuple[float, set[str], set[str], bool]], victim: str
) -> None:
    world = moving()
    for lasts_s, silent, killed, is_blind in scenes:
        world.silent, world.killed, world.is_blind = silent, killed - silent, is_blind
        world.run(lasts_s)
    world.silent, world.killed, world.is_blind = set(), set(), False
    world.run(20)
    world.found.clear()
    world.killed = {victim}
    began = world.now
    world.run(30)
    assert world.lost == [victim]
    assert world.found[0][0] - began <= LATEST_S


@given(st.lists(st.integers(0, 40), max_size=12), st.data())
def test_who_is_alone_is_told_from_all_last_words(times: list[int], data: st.DataObject) -> None:
    words_s = sorted(time / 4 for time in times)
    word_s = data.draw(st.sampled_from(words_s)) if words_s else 1.0
    together = [other_s for other_s in words_s if abs(other_s - word_s) <= 3.0]
    assert is_alone(word_s, words_s) == (len(together) <= 1)
