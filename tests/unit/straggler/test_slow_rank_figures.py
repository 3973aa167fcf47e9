"""How runs of slow ranks are counted, and how the cost of timings is distinguished from noise."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from benchmarks.slow_rank_runs.results import (
    Result,
    append_result,
    missed,
    read_results,
    table,
    wilson,
)
from benchmarks.timing_price import against, interval

RIGHT = Result(
    kind="input", ranks=4, seed=1, number=0, slowed=(2,), found=(2,), cause="input",
    expected_cause="input", windows=3, window_steps=4, cleared_s=2.0,
)  # fmt: skip


def result(number: int = 0, **more: object) -> Result:
    return replace(RIGHT, number=number, **more)


@pytest.mark.parametrize(
    ("one", "wrong"),
    [
        (result(), ""),
        (result(found=()), "slowed rank 2, found nobody"),
        (result(found=(2, 1)), "slowed rank 2, found rank 2, 1"),
        (result(slowed=(2, 3), found=(3,)), ""),
        (result(cause="host", reason="it waited"), "cause host: it waited"),
        (result(cause="host", expected_cause=""), ""),
        (result(windows=4), "after 4 windows"),
        (result(cleared_s=None), "not cleared"),
    ],
)
def test_a_run_is_right_if_nobody_else_is_named_and_soon(one: Result, wrong: str) -> None:
    """A6.1."""
    assert one.wrong == wrong


def test_runs_of_several_sittings_count_once_each(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for number in range(19):
        append_result(first, result(number))
    append_result(second, result(18))
    append_result(second, result(19, found=()))
    known = read_results([first, second, tmp_path / "none"])
    assert len(known) == 20
    _, row = table(known)
    assert "95% (76%-99%)" in row
    assert missed(known) == []
    assert missed([*known, result(20, found=())])[0].startswith("below 95%: 4 ranks, input")


def test_a_line_that_was_cut_is_named(tmp_path: Path) -> None:
    append_result(tmp_path / "file", result())
    with (tmp_path / "file").open("a") as file:
        file.write('{"kind": "inp')
    with pytest.raises(SystemExit, match="file, line 2: .*remove the line"):
        read_results([tmp_path / "file"])


@pytest.mark.parametrize(
    ("good", "count", "low", "high"),
    [(0, 0, 0, 1), (95, 100, 0.888, 0.978), (100, 100, 0.963, 1), (0, 10, 0, 0.278)],
)
def test_shares_have_wilsons_interval(good: int, count: int, low: float, high: float) -> None:
    assert wilson(good, count) == pytest.approx((low, high), abs=1e-3)


def test_a_drift_of_the_machine_is_no_price() -> None:
    drifting = [1.0, 1.5, 2.0, 2.5, 3.0]
    assert against(drifting) == [0, 0]


@pytest.mark.parametrize(("count", "low", "high"), [(6, 0, 5), (9, 1, 7), (16, 3, 12)])
def test_the_median_lies_between_ranks_of_the_order(count: int, low: int, high: int) -> None:
    """As the table of the sign test has them."""
    assert interval([float(one) for one in range(count)]) == (low, high)
