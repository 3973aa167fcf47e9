"""Where the pictures of jobs show what."""

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep_services.history.dashboard.drawings import shares, timeline
from everstep_services.history.dashboard.pages.numerics import drawn_names, results

BEGAN = datetime(2026, 1, 1, 12, tzinfo=UTC)


def at(seconds: float) -> str:
    return (BEGAN + timedelta(seconds=seconds)).isoformat()


def finding(found: str | None, cleared: str | None) -> dict[str, Any]:
    return {"job": "j", "rank": 2, "node": "n", "found_at": found, "cleared_at": cleared}


def test_slow_ranks_are_marked_while_they_are_slow() -> None:
    part = {"since": at(0), "until": at(100), "time_class": "productive", "round": 1}
    slow = [finding(at(20), at(50)), finding(at(90), None), finding(None, None)]
    drawn = timeline([part], [], [], slow)
    assert drawn is not None
    assert [(mark.kind, mark.x, mark.width) for mark in drawn.marks] == [
        ("slow", 200, 300), ("slow", 900, 100),
    ]  # fmt: skip
    assert drawn.marks[0].text == "slow: rank 2 on n"


def test_the_wait_for_nodes_has_the_name_that_goodput_gives_it() -> None:
    """Also before the first round, when nothing restarts."""
    assert [name for _, name, *_ in shares({"rendezvous": 60.0})] == ["Rendezvous"]


def reported(seconds: float, **values: float) -> dict[str, Any]:
    told = [{"name": name, "value": value} for name, value in values.items()]
    return {"at": at(seconds), "step": 1, "values": told}


def case_of(seconds: float, *actions: str) -> dict[str, Any]:
    acts = [{"at": at(seconds + 1), "action": action, "outcome": "done", "story": f"did {action}"}
            for action in actions]  # fmt: skip
    return {"suspected": {"at": at(seconds)}, "judged": None, "acts": acts, "story": ["a spike"],
            "step": 7}  # fmt: skip


def test_a_result_is_drawn_in_its_band_with_marks_of_what_followed() -> None:
    band = {"loss_low": 1.0, "loss_high": 3.0}
    drawn = results(
        [reported(100, loss=2.0, **band), reported(0, loss=2.0, **band), reported(50, loss=9.0)],
        [case_of(50, "skip", "dance"), case_of(-9)],
    )
    assert drawn is not None
    (curve,) = drawn.curves
    assert (curve.low, curve.high, curve.top) == (1.0, 9.0, 6.0), (
        "a spike does not flatten the rest"
    )
    assert curve.lines == ["0.0,96.0 500.0,0.0 1000.0,96.0"]
    assert curve.band == "0.0,120.0 1000.0,120.0 1000.0,72.0 0.0,72.0"
    assert [(mark.kind, mark.text) for mark in drawn.marks] == [
        ("skipped", "steps 7 to 7, whose data are passed over"),
        ("suspected", "a spike"), ("skip", "did skip"),
    ]  # fmt: skip
    assert drawn.kinds == ["suspected", "skipped", "skip"]


def test_where_a_result_is_not_a_number_its_curve_has_a_gap() -> None:
    """Agents leave such a value out; what a script has reported once is in each later report."""
    band = {"loss_low": 1.0, "loss_high": 3.0}
    reports = [reported(0), *(reported(at, loss=2.0, **band) for at in (10, 20, 60, 80)),
               reported(40, **band), reported(100, **band)]  # fmt: skip
    drawn = results([{"round": 1, **report} for report in reports], [])
    assert drawn is not None
    (curve,) = drawn.curves
    assert curve.lines == ["100.0,60.0 200.0,60.0", "600.0,60.0 800.0,60.0"]
    assert curve.last is None
    next_round = [{"round": 1, **reported(0, loss=2.0, **band)}, {"round": 2, **reported(10)},
                  {"round": 2, **reported(20, loss=2.0, **band)}]  # fmt: skip
    drawn = results(next_round, [])
    assert drawn is not None
    assert [len(curve.lines) for curve in drawn.curves] == [1], "it was only not reported yet"


def test_skipped_data_are_a_span_from_the_first_of_their_steps_to_the_roll_back() -> None:
    """Also where these steps are made again later, with other data."""
    case = case_of(44, "skip") | {"step": 45}
    case["suspected"]["moved_at"] = 35
    reports = [reported(second, loss=1.0) | {"step": step}
               for second, step in ((0, 1), (30, 31), (40, 41), (60, 42), (100, 82))]  # fmt: skip
    drawn = results(reports, [case])
    assert drawn is not None
    span, *_ = drawn.marks
    assert (span.kind, span.text) == ("skipped", "steps 35 to 45, whose data are passed over")
    assert (span.x, span.x + span.width) == (340.0, 450.0)


def test_results_are_drawn_apart_from_other_values_only_with_a_band_or_a_case() -> None:
    plain = [reported(0, loss=2.0, speed=1.0), reported(9, loss=2.0, speed=1.0)]
    assert results(plain, []) is None
    assert drawn_names(plain, []) == frozenset()
    assert "loss" in drawn_names(plain, [case_of(5)])
    assert results(plain[:1], [case_of(5)]) is None, "one report makes no line"
