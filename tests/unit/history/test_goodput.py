"""Goodput: each second of an allocation in one class, as computed by hand (A11.4)."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages import Fact, Ledger
from everstep_services.history.goodput.ledger import CLASSES, productive_ratio, seconds, segments
from everstep_services.history.goodput.trace import KINDS, GoodputTrace
from tests.unit.history.goodput_trace import (
    SECONDS,
    TRACE,
    ZERO_S,
    at,
    closed,
    ended,
    progress,
    round_of,
    started,
)


def traced(facts: Iterable[Fact]) -> GoodputTrace:
    trace = GoodputTrace()
    trace.take(facts)
    return trace


def spent(facts: Iterable[Fact], now: float, **window: float) -> dict[str, float]:
    """Seconds by class, without those that are 0."""
    window = {name: ZERO_S + second for name, second in window.items()}
    sums = seconds(segments(traced(facts), ZERO_S + now), **window)
    return {name: round(lasted_s, 6) for name, lasted_s in sums.items() if lasted_s}


def test_a_recorded_trace_equals_what_a_hand_computes() -> None:
    """A11.4."""
    assert spent(TRACE, now=1000) == SECONDS
    assert sum(spent(TRACE, now=1000).values()) == 245


def test_windows_share_the_time_out() -> None:
    """The parts of any cut sum to the whole."""
    whole = spent(TRACE, now=1000)
    halves = [spent(TRACE, 1000, until_s=118.5), spent(TRACE, 1000, since_s=118.5)]
    for name in CLASSES:
        assert sum(half.get(name, 0) for half in halves) == pytest.approx(whole.get(name, 0))


def test_what_is_not_yet_reported_is_unknown() -> None:
    running = [started(), *round_of(1, formed=5, ran=8, first=12), progress(72, 1, 60, 60.0)]
    assert spent(running, now=100)["productive"] == 100 - 12
    assert spent(running, now=300)["productive"] == 72 + 90 - 12
    assert spent(running, now=300)["unknown"] == 300 - 72 - 90


def test_a_job_that_shows_no_steps_is_unknown_while_its_ranks_ran() -> None:
    """As long as it may still make its first step, it starts; a round that ended well ran."""
    begun = [started(), at(5, "round_formed", round=1, allocation="a"),
             at(8, "round_started", round=1)]  # fmt: skip
    assert spent(begun, now=20) == {"rendezvous": 5, "start_up": 15}
    assert spent([*begun, ended(30, 1, "rank_exited")], now=30)["start_up"] == 25
    over = [*begun, ended(30, 1)]
    assert spent(over, now=30) == {"rendezvous": 5, "start_up": 3, "unknown": 22}
    assert productive_ratio(seconds(segments(traced(over), ZERO_S + 30))) is None
    assert productive_ratio(seconds(segments(traced(begun), ZERO_S + 20))) == 0


def test_an_allocation_that_fell_silent_is_unknown_from_then_on() -> None:
    lost = [
        started(), *round_of(1, formed=5, ran=8, first=12), progress(72, 1, 60, 60.0),
        at(400, "allocation_ended", allocation="a", state="lost"),
        started(1000, "b"),
    ]  # fmt: skip
    known = spent(lost, now=1010)
    assert known["unknown"] == 400 - 72 - 90
    assert sum(known.values()) == 400 + 10, "time between allocations is nobody's"


@pytest.mark.parametrize("is_restored", [False, True], ids=["from peers", "from an image"])
def test_the_time_until_all_ranks_have_states_again_is_a_class_of_its_own(
    is_restored: bool,
) -> None:
    """A restore within it is a part of it, and what other ranks report changes nothing."""
    image = at(46.5, "checkpoint_restored", round=2, step=9, took_s=0.5)
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=3), progress(43, 1, 40, 40.0),
        ended(43, 1, "rank_exited"), *round_of(2, formed=44, ran=45, first=48)[:2],
        *([image] if is_restored else []),
        at(47, "state_healed", round=2, rank=0, took_s=1.5),
        at(47, "state_healed", round=2, rank=5, took_s=1.0), round_of(2, 44, 45, 48)[2],
        progress(58, 2, 10, 10.0),
    ]  # fmt: skip
    known = spent(facts, now=58)
    assert (known["heal"], known.get("restore")) == (1.5, None)
    assert known["start_up"] == 2 + (45.5 - 44) + (48 - 47)


def test_steps_that_a_requeue_lost_are_taken_from_the_allocation_before() -> None:
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=3), progress(63, 1, 60, 60.0),
        ended(63, 1, "preempted"), at(64, "allocation_ended", allocation="a", state="requeued"),
        started(100, "b"),
        at(101, "round_formed", round=2, allocation="b", incident=None),
        at(102, "round_started", round=2),
        at(104, "progress_made", round=2, is_first=True, steps=1, steps_s=2.0, lost_steps=10),
        progress(114, 2, 10, 10.0),
    ]  # fmt: skip
    known = spent(facts, now=114)
    assert known["lost_steps"] == 10
    assert known["productive"] == 60
    assert known["idle"] == 1


@pytest.mark.parametrize("is_reported", [True, False], ids=["counted", "its node was lost"])
def test_steps_that_an_incident_lost_cost_what_they_had_taken(is_reported: bool) -> None:
    """Without the start of the process, which is in the time of a round's first step."""
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=33),
        *([progress(43, 1, 20, 10.0)] if is_reported else []),
        ended(43, 1, "rank_exited", "i"), *round_of(2, formed=44, ran=45, first=66),
        at(66, "incident_closed", incident="i", outcome="recovered", lost_s=0.0, lost_steps=8,
           ledger=Ledger(detect_s=0.0), next_round=2),
        progress(76, 2, 20, 10.0),
    ]  # fmt: skip
    assert spent(facts, now=76)["lost_steps"] == 8 * 0.5


def test_a_slow_rank_that_is_not_cleared_costs_what_its_finding_estimates() -> None:
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=3),
        at(13, "straggler_found", round=1, rank=3, id="slow", slowdown_ratio=0.25),
        progress(63, 1, 60, 60.0),
    ]  # fmt: skip
    assert spent(facts, now=63)["straggler_tax"] == pytest.approx(50 * 0.25 / 1.25)


def test_a_nodes_clock_that_is_wrong_moves_nothing_past_what_rendezvous_said() -> None:
    """A node whose clock is an hour ahead reports its first step."""
    facts = [
        started(), at(5, "round_formed", round=1, allocation="a"), at(8, "round_started", round=1),
        at(3612, "progress_made", round=1, is_first=True, steps=1, steps_s=4.0, lost_steps=0),
        ended(100, 1), at(101, "allocation_ended", allocation="a", state="done"),
    ]  # fmt: skip
    assert sum(spent(facts, now=200).values()) == 101


def test_facts_in_pieces_give_the_same_as_at_once() -> None:
    whole = segments(traced(TRACE), ZERO_S + 500)
    trace = GoodputTrace()
    for fact in TRACE:
        trace.take([fact])
    assert segments(trace, ZERO_S + 500) == whole


kinds = st.sampled_from(KINDS)


@given(
    st.lists(
        st.tuples(kinds, st.floats(-50, 500), st.integers(1, 4), st.floats(0, 90)), max_size=40
    ),
    st.floats(0, 600),
)
def test_whatever_the_facts_say_time_sums_to_the_wall_clock(
    drawn: list[tuple[type[Fact], float, int, float]], now: float
) -> None:
    """Nothing is counted twice, or negative, or forgotten, in whatever order facts come."""
    tags = {kind: kind.__struct_config__.tag for kind in KINDS}
    facts = [started()]
    for kind, second, number, length in drawn:
        name = str(tags[kind]).removesuffix(".v1")
        values: dict[str, Any] = {
            field: value
            for field, value in {
                "round": number, "allocation": "ab"[number % 2], "stall_s": length, "lag_s": length,
                "write_s": 0.0, "hash_s": 0.0, "took_s": length, "stalled_s": length, "steps": 5,
                "steps_s": length, "lost_steps": number, "lost_s": length, "step": number,
                "incident": "i", "next_round": number, "ledger": Ledger(detect_s=length),
                "finding": "slow", "slowdown_ratio": length / 10,
            }.items()
            if field in kind.__struct_fields__
        }  # fmt: skip
        facts.append(at(second, name, **values))
    trace = traced(facts)
    parts = segments(trace, ZERO_S + now)
    assert all(part.lasted_s > 0 and 0 <= part.tax_ratio <= 1 for part in parts)
    assert all(one.until_s <= after.from_s for one, after in itertools.pairwise(parts))
    assert sum(seconds(parts).values()) == pytest.approx(_wall_s(trace, ZERO_S + now), abs=1e-3)


def _wall_s(trace: GoodputTrace, now_s: float) -> float:
    """How long all allocations lasted: each until it ended, or the next one began."""
    starts = [one.started_s for one in trace.allocations[1:]] + [max(now_s, trace.newest_s)]
    ends = [one.ended_s for one in trace.allocations]
    return sum(
        (start if end is None else min(start, end) if one is not trace.allocations[-1] else end)
        - one.started_s
        for one, start, end in zip(trace.allocations, starts, ends, strict=True)
    )


def stalled(second: float, rank: int, waited_s: float) -> Fact:
    return at(second, "rank_stalled", round=1, rank=rank, waited_s=waited_s)


def test_a_job_that_stands_still_is_not_productive_while_it_stands() -> None:
    """Whether or not a report of steps comes, and however long it lasts."""
    stands = [started(), *round_of(1, formed=1, ran=2, first=3), progress(63, 1, 60, 60.0),
              stalled(76, 1, 6.0), stalled(76.1, 0, 6.0)]  # fmt: skip
    begun = {"rendezvous": 1.0, "start_up": 2.0, "productive": 67.0}
    for now in (100, 1000):
        assert spent(stands, now) == pytest.approx({**begun, "stall": now - 70})
    moved = [at(200, "rank_recovered", round=1, rank=1, stalled_s=130.0)]
    moved += [at(200, "rank_recovered", round=1, rank=0, stalled_s=129.9)]
    goes_on = spent([*stands, *moved, progress(210, 1, 10, 147.0)], 220)
    assert goes_on == pytest.approx({**begun, "stall": 130, "productive": 87})


def test_steps_made_again_cost_what_they_had_taken_without_the_stall_among_them() -> None:
    """The round before made 1000 steps that a checkpoint has kept."""
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=3), progress(1003, 1, 1000, 1000.0),
        stalled(1019, 1, 6.0), progress(1073, 1, 10, 70.0), ended(1073, 1, "node_lost", "i"),
        at(1074, "round_formed", round=2, allocation="a", incident="i"),
        at(1075, "round_started", round=2),
        at(1076, "progress_made", round=2, is_first=True, steps=1, steps_s=1.0, lost_steps=10),
        closed(1076, "i", detect_s=6.0, lost_s=0.0, next_round=2),
    ]  # fmt: skip
    got = spent(facts, 1080)
    assert got["stall"] == 60
    assert got["lost_steps"] == pytest.approx(10, abs=0.2)
    assert got["productive"] == pytest.approx(1010 - 10 + 4, abs=0.2)


def test_steps_that_a_round_goes_back_over_are_lost_in_that_round() -> None:
    """Round 2 goes back 40 steps after 100 s, which takes 5 s; round 1 loses none."""
    facts = [
        started(), *round_of(1, formed=1, ran=2, first=3), progress(63, 1, 60, 60.0),
        ended(63, 1, "operator"), *round_of(2, formed=64, ran=65, first=66),
        at(171, "incident_closed", round=2, incident="i", outcome="recovered", lost_steps=40,
           next_round=2, lost_s=0.0, ledger=Ledger(other_s=5.0)),
        progress(266, 2, 100, 200.0),
    ]  # fmt: skip
    got = spent(facts, 266)
    assert (got["lost_steps"], got["productive"]) == (80, 60 + 200 - 80)
    lost = spent(facts, 266, since_s=86, until_s=166)
    assert lost == {"lost_steps": 80}
