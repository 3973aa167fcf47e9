"""Slow ranks in plain words and shades: what is not known is neither slow nor fast."""

from collections.abc import Sequence
from typing import Any

import click
import pytest

from everstep_services.cli.cells import percent, slow_rank
from everstep_services.cli.commands.jobs import stragglers
from everstep_services.cli.output import say_cut
from everstep_services.cli.pages.limits import in_force_page
from everstep_services.cli.pages.stragglers.job import _compared, heat_map, remarks

FOUND: dict[str, Any] = {
    "rank": 3, "node": "node-2", "cause": "input", "slower_ratio": 0.3, "section": "data",
    "found_at": "2026-11-21T07:00:00Z", "reason": "30 % above the median",
}  # fmt: skip
NOW: dict[str, Any] = {
    "round": 2, "window": 320, "window_steps": 16, "step_s": 0.5, "ranks_seen": 8,
    "ranks_missing": 0, "found": [], "groups": [], "slowdown_ratio": None, "is_on": True,
    "note": None,
}  # fmt: skip


def table(*rows: Sequence[float | None], measure: str = "own") -> dict[str, Any]:
    windows = [{"first_step": 16 * i + 1, "last_step": 16 * (i + 1)} for i in range(len(rows[0]))]
    shown = [{"rank": i, "node": f"n{i}", "values": row} for i, row in enumerate(rows)]
    return {"measure": measure, "section": None, "windows": windows, "rows": shown}


@pytest.mark.parametrize(
    ("ratio", "text"),
    [(0.3, "+30 %"), (0.034, "+3.4 %"), (-0.25, "-25 %"), (0.0001, "0 %"), (2.5, "+250 %")],
)
def test_a_ratio_is_shown_in_percent(ratio: float, text: str) -> None:
    assert percent(ratio) == text


def test_a_slow_rank_is_named_with_what_is_known_of_it() -> None:
    assert slow_rank(FOUND) == "rank 3 (node-2, input, +30 %)"
    assert slow_rank({**FOUND, "slower_ratio": None}) == "rank 3 (node-2, input)"


def test_a_heat_map_shades_up_to_the_slowest_rank_and_leaves_gaps() -> None:
    fast, slow = [9.0, 0.1, None, 0.1, 0.1], [9.0, 0.8, 0.5, 0.8, 0.8]
    assert list(heat_map(table(fast, slow), columns=100)) == [
        "own, steps 1 to 80: ▁ 100 ms to 800 ms or more █, · not known",
        "     0  n0              █▁·▁▁  100 ms",
        "     1  n1              ██▅██  800 ms",
    ]


def test_a_heat_map_that_is_too_wide_shows_the_latest_windows() -> None:
    narrow = heat_map(table([5.0] * 39 + [6.0]), columns=42)
    assert next(narrow).startswith("own, steps 513 to 640: ▁ 5 s to 5 s or more █")
    assert next(narrow).endswith("  ▁▁▁▁▁▁▁█  6 s")


def test_a_heat_map_of_equal_values_or_of_none_divides_by_nothing() -> None:
    equal = list(heat_map(table([0.0, 0.0], measure="ratio"), columns=80))
    assert equal[0] == "ratio, steps 1 to 32: ▁ 0 % to 0 % █, · not known"
    assert equal[1].endswith("▁▁  0 %")
    assert list(heat_map(table([None, None]), columns=80)) == []


def test_where_nobody_counts_steps_it_says_that_times_are_those_of_a_second() -> None:
    by_time = {**NOW, "window": 1_763_913_600, "step_s": 1.0, "is_by_time": True}
    assert list(remarks(by_time)) == [
        "round 2, up to 16:00:00 UTC: nobody counts steps, so times are those of a second",
        "8 ranks compared",
    ]


def test_beside_the_ranks_it_says_who_is_slow_who_waits_and_the_price() -> None:
    group = {"group": "dp", "ranks": 8, "last_rank": 3, "last_ratio": 0.875, "waited_s": 0.12}
    quiet = {**group, "group": "tp", "last_rank": None}
    found = {**NOW, "found": [FOUND], "groups": [group, quiet], "slowdown_ratio": 0.24}
    assert list(remarks(found)) == [
        "round 2, up to step 320: a step takes 500 ms",
        "8 ranks compared",
        "slow since 2026-11-21 07:00:00 UTC: rank 3 (node-2, input, +30 %) in section data",
        "  30 % above the median",
        "group dp (8 ranks): the others wait 120 ms a step for rank 3, last in 88 % of its "
        "collectives",
        "without it the job would be 24.0 % faster",
    ]


def test_while_nothing_is_measured_it_says_why_and_how_to_change_that() -> None:
    found = {**NOW, "window": 0, "is_on": False, "note": "nothing was heard yet"}
    assert list(remarks(found)) == [
        "timings are off: everstep control set straggler.timings=on switches them on",
        "nothing was heard yet",
    ]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["llama"], "show"),
        (["--history", "llama"], "show"),
        (["show", "analyze"], "show"),
        (["analyze", "trace.json"], "analyze"),
    ],
)
def test_the_first_word_is_a_job_unless_it_is_a_command(words: list[str], name: str) -> None:
    group = stragglers.command
    assert isinstance(group, click.Group)
    context = group.make_context("stragglers", list(words))
    found, _, _ = group.resolve_command(context, [*context._protected_args, *context.args])
    assert found == name


def test_a_list_of_nothing_is_not_called_cut(capsys: pytest.CaptureFixture[str]) -> None:
    say_cut(0)
    assert capsys.readouterr().err == ""
    say_cut(3)
    assert capsys.readouterr().err == "only 3 are shown, and there are more: -n 30 shows more\n"


def test_each_switch_of_slow_ranks_is_a_line_with_its_source() -> None:
    """What holds is shown, set or not (A6.5)."""
    values = [("straggler.cpu", "off", "control"), ("straggler.window_s", "10", "default")]
    switches = [{"name": name, "value": value, "source": one} for name, value, one in values]
    head, *lines = in_force_page(switches, "llama")
    assert head == "slow ranks, job llama:"
    assert [line.split() for line in lines] == [
        ["straggler.cpu", "off", "(set", "for", "all", "jobs)"],
        ["straggler.window_s", "10", "(default)"],
    ]
    assert list(in_force_page([], None)) == []


@pytest.mark.parametrize(("late_s", "shown"), [(-0.001, "0 ms"), (0.04, "40 ms"), (None, "")])
def test_nobody_is_late_by_less_than_nothing(late_s: float | None, shown: str) -> None:
    rank = {
        "rank": 3, "scores": [], "is_straggler": False, "own_s": 0.4, "slower_ratio": 0.0,
        "lateness_s": late_s, "waited_s": 0.0,
    }  # fmt: skip
    assert _compared(rank, None)["late"] == shown
