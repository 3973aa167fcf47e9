"""How many nodes may be lost: compared with trying every set of them."""

from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from everstep.messages import Holding
from everstep_services.catalog.domain.replication import current, step_held, survivable


def whole(slot: int, holder: str, *, step: int = 100, round_: int = 1) -> Holding:
    return Holding(slot=slot, holder=holder, step=step, round=round_)


def part(slot: int, holder: str, number: int, needed: int) -> Holding:
    return Holding(slot=slot, holder=holder, step=100, round=1, part=number, parts_needed=needed)


def can_be_had(slots: int, holdings: list[Holding], lost: set[str]) -> bool:
    """Whether every slot's state is still there without these nodes."""
    for slot in range(slots):
        left = [one for one in holdings if one.slot == slot and one.holder not in lost]
        needed = [one.parts_needed for one in left if one.parts_needed > 1]
        parts = {one.part for one in left if one.parts_needed > 1}
        is_whole = any(one.parts_needed == 1 for one in left)
        if not is_whole and not (needed and len(parts) >= needed[0]):
            return False
    return True


def tried(slots: int, holdings: list[Holding]) -> int | None:
    """The same by brute force."""
    nodes = sorted({one.holder for one in holdings})
    for count in range(len(nodes) + 1):
        for lost in combinations(nodes, count):
            if not can_be_had(slots, holdings, set(lost)):
                return None if count == 0 else count - 1
    return len(nodes)


NODES = st.sampled_from([f"n{number}" for number in range(7)])


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, list[Holding]]:
    slots, needed = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    held: list[Holding] = []
    for slot in range(slots):
        held += [whole(slot, node) for node in draw(st.sets(NODES, max_size=3))]
        numbers = draw(st.lists(st.tuples(NODES, st.integers(0, 5)), max_size=7, unique=True))
        held += [part(slot, node, number, needed) for node, number in numbers]
    return slots, held


@given(layouts())
def test_it_is_what_trying_every_set_of_nodes_gives(layout: tuple[int, list[Holding]]) -> None:
    slots, held = layout
    assert survivable(held, slots)[0] == tried(slots, held)


def test_a_mirror_survives_any_one_node_and_not_a_pair() -> None:
    held = [whole(slot, f"n{node}") for slot in range(8) for node in (slot, slot ^ 1)]
    least, each = survivable(held, 8)
    assert least == 1
    assert set(each.values()) == {1}
    assert tried(8, held) == 1


def test_parts_beside_the_own_copy_survive_as_many_as_are_spare() -> None:
    held = [whole(0, "own"), *(part(0, f"n{number}", number, 4) for number in range(6))]
    assert survivable(held, 1)[0] == 3 == tried(1, held)


def test_a_slot_that_nobody_has_is_lost() -> None:
    least, each = survivable([whole(0, "a")], 2)
    assert least is None
    assert each == {0: 0, 1: -1}


def test_only_the_newest_round_of_a_slot_counts() -> None:
    held = [whole(0, "a"), whole(0, "b"), whole(0, "c", round_=2, step=140)]
    assert [one.holder for one in current(held)[0]] == ["c"]
    assert survivable(held, 1)[0] == 0


def test_the_step_is_the_newest_that_every_slot_has() -> None:
    held = current([whole(0, "a", step=120), whole(0, "b"), whole(1, "b", step=110)])
    assert step_held(held, 2) == 110
    assert step_held(held, 3) is None
