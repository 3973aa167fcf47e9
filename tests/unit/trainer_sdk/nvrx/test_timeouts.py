"""The numbers that NVRx calculates from heartbeats and sections (its rows 18 to 24)."""

import pytest

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.nvrx.timeouts import (
    HeartbeatTimeouts,
    SectionAction,
    SectionTimeouts,
    TimeoutsCalc,
    TimeoutsCalcError,
)

OPEN, CLOSE, CLOSE_ALL = SectionAction.OPEN, SectionAction.CLOSE, SectionAction.CLOSE_ALL


def beating() -> TimeoutsCalc:
    calc = TimeoutsCalc(start_time=0, safety_factor=2)
    for now in (10, 11, 18, 20):
        calc.update_on_heartbeat(now)
    return calc


def in_sections() -> TimeoutsCalc:
    calc = TimeoutsCalc(sections=["one", "two"], start_time=5, safety_factor=1)
    for name, action, now in (
        ("one", OPEN, 10), ("two", OPEN, 13), ("two", CLOSE, 23), ("one", CLOSE, 40),
        ("one", OPEN, 100), ("one", CLOSE, 120),
    ):  # fmt: skip
        calc.update_on_section_event(name, action, now)
    return calc


def test_heartbeats_are_the_longest_times_with_the_factor() -> None:
    calc = beating()
    assert calc.get_hb_timeouts() == HeartbeatTimeouts(20, 14, were_calculated=True)
    former = HeartbeatTimeouts(21, 15, were_calculated=True)
    assert calc.get_hb_timeouts(former) == HeartbeatTimeouts(20.5, 14.5, were_calculated=True)
    configured = HeartbeatTimeouts(999, 999, were_calculated=False)
    assert calc.get_hb_timeouts(configured).initial == 20


def test_one_heartbeat_is_not_enough() -> None:
    calc = TimeoutsCalc(start_time=0)
    calc.update_on_heartbeat(1)
    assert not calc.can_get_hb_timeouts()
    with pytest.raises(TimeoutsCalcError, match="fewer than two heartbeats"):
        calc.get_hb_timeouts()


def test_sections_and_the_time_outside_of_them() -> None:
    calc = in_sections()
    assert calc.get_section_timeouts().section == {"one": 30, "two": 10}
    assert calc.get_section_timeouts().out_of_section == 60
    calc.maybe_bump_oos_time(220)
    assert calc.get_section_timeouts() == SectionTimeouts(
        {"one": 30, "two": 10}, 100, {"one", "two"}, is_out_of_section_calculated=True
    )


def test_only_what_was_calculated_before_is_averaged() -> None:
    calc = in_sections()
    former = SectionTimeouts({"one": 999, "two": 9}, 203, {"two"}, True)
    made = calc.get_section_timeouts(current=former)
    assert made.section == {"one": 30, "two": 9.5}
    assert made.out_of_section == 131.5


def test_what_cannot_have_happened_is_an_error() -> None:
    calc = in_sections()
    calc.update_on_section_event("one", OPEN, 130)
    for name, action in (("one", OPEN), ("two", CLOSE), ("three", OPEN), (None, OPEN)):
        with pytest.raises(TimeoutsCalcError):
            calc.update_on_section_event(name, action, 140)


def test_a_part_of_the_sections_can_be_calculated() -> None:
    calc = TimeoutsCalc(sections=["one", "two"], start_time=0, safety_factor=1)
    calc.update_on_section_event("one", OPEN, 1)
    calc.update_on_section_event("one", CLOSE, 4)
    assert not calc.can_get_section_timeouts()
    assert calc.can_get_section_timeouts(["one"], calc_out_of_section=False)
    made = calc.get_section_timeouts(["one"], calc_out_of_section=False)
    assert made == SectionTimeouts({"one": 3, "two": None}, None, {"one"}, False)
    assert not made.are_valid
    with pytest.raises(TimeoutsCalcError):
        calc.get_section_timeouts(["two"])


def test_all_open_sections_can_be_closed_at_once() -> None:
    calc = TimeoutsCalc(start_time=0, safety_factor=1)
    for name, now in (("a", 1), ("b", 3), ("c", 6)):
        calc.update_on_section_event(name, OPEN, now)
    states = [calc.is_out_of_section]
    calc.update_on_section_event(None, CLOSE_ALL, 10)
    states.append(calc.is_out_of_section)
    assert states == [False, True]
    made = calc.get_section_timeouts()
    assert made.section == {"a": 9, "b": 7, "c": 4}
    assert made.out_of_section == 1


def test_all_ranks_have_the_longest_times_of_any() -> None:
    def rank(group: RankGroup) -> SectionTimeouts:
        calc = TimeoutsCalc(start_time=0, safety_factor=1)
        if group.rank == 1:
            calc.update_on_section_event("one", OPEN, 20)
            calc.update_on_section_event("one", CLOSE, 22)
        if group.rank == 2:
            calc.update_on_section_event("two", OPEN, 10)
            calc.update_on_section_event("two", CLOSE, 18)
        calc.synchronize_all(group)
        return calc.get_section_timeouts()

    wanted = SectionTimeouts({"one": 2, "two": 8}, 20, {"one", "two"}, True)
    assert together(3, rank) == [wanted] * 3
