"""What `everstep stragglers analyze` finds in traces, and how it reports it."""

import csv
import json
import re
import sys
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.straggler_traces.distributions import PLAIN, VARIABLE, Noise, Slow
from benchmarks.straggler_traces.simulator import Plan, simulate, truth
from everstep.units import size
from everstep_services.cli.__main__ import main
from everstep_services.cli.commands.jobs import stragglers
from everstep_services.straggler.domain.analysis import NothingToCompareError, analyze
from everstep_services.straggler.domain.report import TraceReport
from everstep_services.straggler.traces import read_traces
from tests.unit.straggler.traces import (
    HEAD,
    Row,
    columns_written,
    data_parallel,
    simulated,
    written,
)

QUIET = Noise(jitter=0.005, unequal=0.001, drift=0, collected=0, checkpoint_every=0, transfers=0.02)


def report_of(tmp_path: Path, plan: Plan) -> TraceReport:
    return analyze(simulated(tmp_path / "t.csv", plan))


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize("what", ["compute", "input"])
def test_the_slow_rank_is_named_with_its_cause_and_its_price(
    tmp_path: Path, what: str, pipeline: int
) -> None:
    """Simulated ranks: slow computation, and slow input (A6.1)."""
    plan = Plan(4, data=4, pipeline=pipeline, steps=40, slow=(Slow(2, 0.3, 10, what=what),))
    (found,) = report_of(tmp_path, plan).findings
    assert (found.kind, found.ranks, found.cause) == ("rank", (2,), what)
    assert 5 <= found.first_step <= 12
    assert found.price_ratio == pytest.approx(truth(plan), abs=0.02)
    assert found.confidence > 0.8
    assert not found.cleared


def test_a_rank_that_recovers_was_slow(tmp_path: Path) -> None:
    (found,) = report_of(tmp_path, Plan(4, steps=60, slow=(Slow(2, 0.3, 0, 20),))).findings
    assert found.cleared
    assert found.last_step < 45


def test_time_outside_of_operations_is_the_hosts(tmp_path: Path) -> None:
    """Late entry into a collective is the host's time (A6.1)."""
    rows = data_parallel(steps=30, slow=1, by=0.0)
    late = [
        (rank, step, op, start + (0.2 if rank == 1 and op == "all_reduce" else 0), took - 0.2 * (
            rank == 1 and op == "all_reduce"), group)
        for rank, step, op, start, took, group in data_parallel(steps=30, transfer=0.5)
    ]  # fmt: skip
    assert len(rows) == len(late)
    (found,) = analyze(read_traces([written(tmp_path / "t.csv", late)]).table).findings
    assert (found.ranks, found.cause) == ((1,), "host")


def test_a_slow_last_stage_is_by_design(tmp_path: Path) -> None:
    """The last stage of a pipeline has more work, and nobody is blamed (A6.3)."""
    report = report_of(tmp_path, Plan(5, data=4, pipeline=4, steps=20, last_stage=0.5))
    assert report.findings == ()
    (design,) = report.designs
    assert (design.what, design.role, design.ranks) == (
        "uneven stages",
        "stage 3",
        (12, 13, 14, 15),
    )
    assert design.price_ratio is not None
    assert design.price_ratio > 0.15
    shares = {one.cause: one.ratio for one in report.shares}
    assert shares["uneven stages"] == max(shares.values())


@pytest.mark.parametrize("known", [True, False], ids=["lengths known", "lengths not known"])
def test_lengths_of_sequences_are_by_design(tmp_path: Path, *, known: bool) -> None:
    """Unequal work is reported as a design, and nobody is blamed (A6.3)."""
    plan = Plan(6, data=8, steps=40, noise=VARIABLE, lengths_shown=known)
    report = report_of(tmp_path, plan)
    assert report.findings == ()
    assert [one.what for one in report.designs] == ["sequence lengths"]


def test_a_slow_rank_among_unequal_sequences_is_still_found(tmp_path: Path) -> None:
    slow = (Slow(3, 0.1),)
    plan = Plan(6, data=8, steps=60, noise=VARIABLE, lengths_shown=True, slow=slow)
    report = report_of(tmp_path, plan)
    assert [one.ranks for one in report.findings] == [(3,)]


def test_a_slow_link_is_found_at_the_rank_that_its_links_have_in_common(tmp_path: Path) -> None:
    """A slow link has the cause `network` (A6.1)."""
    plan = Plan(7, data=6, pipeline=3, steps=40, noise=QUIET, link_s=0.02, slow=(
        Slow(8, 2.0, what="network"),))  # fmt: skip
    report = report_of(tmp_path, plan)
    network = [one for one in report.findings if one.cause == "network"]
    assert network
    assert all(8 in one.ranks for one in network)
    assert not [one for one in report.findings if one.cause != "network"]


def test_a_healthy_training_has_no_findings(tmp_path: Path) -> None:
    report = report_of(tmp_path, Plan(8, data=8, steps=60, noise=PLAIN))
    assert (report.findings, report.designs) == ((), ())
    assert report.slowdown_ratio == pytest.approx(1, abs=0.05)


def test_clocks_that_are_apart_and_drift_are_aligned_by_collectives(tmp_path: Path) -> None:
    plan = Plan(9, data=4, pipeline=2, steps=40, slow=(Slow(5, 0.3),), transfers_shown=False)
    straight = report_of(tmp_path, plan)
    columns = simulate(plan).columns
    rows = list(zip(*columns.values(), strict=True))
    fast = [1 + (rank - 4) * 50e-6 for rank in range(8)]
    skewed = [(row[0], row[1], row[2], row[3] * fast[row[0]] + row[0] * 3.0,
               row[4] * fast[row[0]], *row[5:]) for row in rows]  # fmt: skip
    report = analyze(read_traces([written(tmp_path / "s.csv", skewed, list(columns))]).table)
    assert any("clocks were up to 21 s apart" in note for note in report.notes)
    assert [one.ranks for one in report.findings] == [one.ranks for one in straight.findings]
    prices = [one.findings[0].price_ratio for one in (report, straight)]
    assert prices[0] == pytest.approx(prices[1], abs=0.01)


@pytest.mark.parametrize("digits", [3, 4])
def test_times_that_are_rounded_are_no_dependencies_lost(tmp_path: Path, digits: int) -> None:
    plan = Plan(9, data=4, pipeline=2, steps=30, slow=(Slow(5, 0.3),))
    columns = simulate(plan).columns
    for name in ("start", "duration"):
        columns[name] = [round(one, digits) for one in columns[name]]
    report = analyze(read_traces([columns_written(tmp_path / "t.csv", columns)]).table)
    (found,) = report.findings
    assert found.ranks == (5,)
    assert found.price_ratio == pytest.approx(truth(plan), abs=0.02)


def test_roles_are_inferred_where_nobody_declares_them(tmp_path: Path) -> None:
    """Pipeline stages are distinguished without a declaration (A6.3)."""
    columns = simulate(Plan(10, data=4, pipeline=3, steps=12, slow=(Slow(5, 0.3),))).columns
    for name in ("data_rank", "pipeline_rank"):
        del columns[name]
    report = analyze(read_traces([columns_written(tmp_path / "t.csv", columns)]).table)
    assert report.roles == {"like rank 0": 4, "like rank 4": 4, "like rank 8": 4}
    assert [one.ranks for one in report.findings if one.kind == "rank"] == [(5,)]


def test_declared_roles_win(tmp_path: Path) -> None:
    rows = [(*row, "odd" if row[0] % 2 else "even") for row in data_parallel(steps=12, ranks=8)]
    report = analyze(read_traces([written(tmp_path / "t.csv", rows, [*HEAD, "role"])]).table)
    assert report.roles == {"even": 4, "odd": 4}


def test_operations_that_enclose_others_do_not_count_twice(tmp_path: Path) -> None:
    rows = data_parallel(steps=12, slow=1)
    whole = [(rank, step, "train_step", start - 0.0001, 1.39, "")
             for rank, step, op, start, _, _ in rows if op == "compute"]  # fmt: skip
    report = analyze(read_traces([written(tmp_path / "t.csv", [*rows, *whole])]).table)
    assert any("enclose" in note for note in report.notes)
    assert [one.ranks for one in report.findings] == [(1,)]


def test_steps_that_a_rank_lacks_are_left_out(tmp_path: Path) -> None:
    rows = [row for row in data_parallel(steps=20, slow=1) if (row[0], row[1]) != (3, 7)]
    report = analyze(read_traces([written(tmp_path / "t.csv", rows)]).table)
    assert (report.steps, [one.ranks for one in report.findings]) == (19, [(1,)])
    assert "1 steps that not all ranks have were left out" in report.notes


@pytest.mark.parametrize(
    ("steps", "ranks", "complaint"), [(5, 1, "one rank only"), (1, 4, "two are needed")]
)
def test_too_little_to_compare(tmp_path: Path, steps: int, ranks: int, complaint: str) -> None:
    rows = data_parallel(steps=steps, ranks=ranks)
    with pytest.raises(NothingToCompareError, match=complaint):
        analyze(read_traces([written(tmp_path / "t.csv", rows)]).table)


# ---- the command


def called(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["stragglers", "analyze", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_verdict_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.csv", data_parallel(steps=20, slow=2))
    code, out, err = called(capsys, path)
    assert (code, err) == (3, "")
    first = out.splitlines()[0]
    assert first.startswith("rank 2 is slow (compute): its computations take 30.0 % longer than ")
    assert re.search(r"from step 0 on; without it the job would be 27\.\d % faster$", first)
    assert re.search(r"worst ranks:\n .*RANK.*\n +2 +- +all ranks +1.3 s +\+30.0 %", out)


def test_nobody_slow_is_said_and_is_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "t.csv", data_parallel(steps=20))
    code, out, _ = called(capsys, path)
    assert code == 0
    assert out.startswith("no rank is slow: 4 ranks compared within 'all ranks' (4)\n")


def contradictory(folder: Path) -> Path:
    """Ranks leave collectives before the others enter them, and it is not their clocks."""
    rows: list[Row] = []
    for step, rank in product(range(20), range(4)):
        begin = 10.0 * step
        first, second = (0.0, 5.8) if rank % 2 else (3.0, 4.0)
        rows.append((rank, step, "all_reduce", begin + first, 0.1, "world"))
        rows.append((rank, step, "compute", begin + first + 0.1, second - first - 0.1, ""))
        rows.append((rank, step, "all_reduce", begin + second, 0.1, "world"))
    return written(folder / "contradictory.csv", rows)


@pytest.mark.parametrize(
    ("case", "options", "why"),
    [
        ("contradictory", (), "none of its 20 steps is reproduced to 5 % by"),
        ("two ranks", (), "the largest of its roles has 2 ranks, and 3 are needed"),
        ("four ranks", ("--window", 10), "of 3 windows that are needed, its steps make 2: give "),
    ],
)
def test_what_was_not_judged_is_not_called_healthy(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    case: str,
    options: tuple[object, ...],
    why: str,
) -> None:
    """No verdict without something to compare: a headline of its own, and code 1."""
    file = {
        "contradictory": contradictory(tmp_path),
        "two ranks": written(tmp_path / "2.csv", data_parallel(steps=40, ranks=2, slow=1)),
        "four ranks": written(tmp_path / "4.csv", data_parallel(steps=20)),
    }[case]
    page = tmp_path / "page.html"
    code, out, err = called(capsys, file, *options, "--html", page)
    first = out.splitlines()[0]
    assert (code, err) == (1, "")
    assert first.startswith(f"no rank could be judged: {why}")
    assert "no rank is slow" not in out
    assert f'<section class="card unjudged"><h2>{first}</h2>' in page.read_text(encoding="utf-8")
    code, out, _ = called(capsys, file, *options, "-o", "json")
    assert (code, json.loads(out)["unjudged"]) == (1, first.partition(": ")[2])


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_person_is_told_that_a_large_file_takes_long(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_terminal: bool,
) -> None:
    monkeypatch.setattr(stragglers, "LARGE_BYTES", 1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    path = written(tmp_path / "t.csv", data_parallel(steps=20))
    code, _, err = called(capsys, path)
    shown = f"reading and comparing t.csv ({size(path.stat().st_size)}): this may take minutes\n"
    assert (code, err) == (0, shown if is_terminal else "")


def test_a_number_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "t.csv", data_parallel(steps=20, slow=2))
    code, out, err = called(capsys, path, "--slower", "nan")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'--slower': nan is not in the range 0.001<=x<=10;" in err


@pytest.mark.parametrize(("unit", "factor", "longest"), [("us", 1.0, "2e-06"), ("s", 0.0, "0")])
def test_durations_that_are_0_in_their_unit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unit: str, factor: float, longest: str
) -> None:
    rows = [(*row[:4], row[4] * factor, row[5]) for row in data_parallel(steps=20, compute=2.0)]
    path = written(tmp_path / "t.csv", rows)
    code, out, err = called(capsys, path, "--unit", unit)
    assert (code, out) == (2, "")
    assert err == (
        f"everstep: {path}: all its durations are 0 (the longest is {longest} s): are they in "
        "another unit (--unit)?\n"
    )


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path / "t.csv", data_parallel(steps=20, slow=2))
    code, out, _ = called(capsys, path, "-o", "json")
    found: dict[str, Any] = json.loads(out)
    assert code == 3
    assert found["schema"] == "everstep.straggler_analysis/v1"
    assert found["findings"][0]["ranks"] == [2]
    assert found["findings"][0]["cause"] == "compute"
    assert len(found["heat_map"]["ratios"]) == 4
    assert len(found["heat_map"]["ratios"][0]) == len(found["heat_map"]["steps"]) == 20
    (slow,) = [row for row in found["rank_rows"] if row["rank"] == 2]
    assert slow["relative_score"] == pytest.approx(1 / 1.3, abs=0.01)


class Page(HTMLParser):
    """What a browser would fetch, and the texts it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_needs_nothing_else_and_escapes_what_a_trace_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "</script><script>alert(1)</script><!--DATA-->"
    rows = [(*row, evil, evil) for row in data_parallel(steps=20, slow=2)]
    path = written(tmp_path / "t.csv", rows, [*HEAD, "role", "host"])
    called(capsys, path, "--html", tmp_path / "t.html")
    text = (tmp_path / "t.html").read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.addresses == []
    assert page.tags.count("script") == 2
    assert "alert(1)" not in "".join(re.findall(r"<script[^>]*>(.*?)</script>", text, re.S))
    assert any("rank 2" in one for one in page.texts)
    assert text.count("t.csv") == 2
    assert "default-src 'none'" in text


def test_a_page_of_thousands_of_ranks_stays_small(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "t.csv", data_parallel(steps=6, ranks=2000, slow=1234))
    code, out, _ = called(capsys, path, "--html", tmp_path / "t.html")
    assert code == 3
    assert out.startswith("rank 1234 is slow")
    assert (tmp_path / "t.html").stat().st_size < 1_000_000
    assert "A line is the worst of 4 ranks." in (tmp_path / "t.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["missing.csv"],
         "everstep: missing.csv: it cannot be read: No such file or directory\n"),
        (["."], "everstep: .: it cannot be read: it is a folder, not a regular file\n"),
        ([], "everstep: Missing argument 'FILE...'; see everstep stragglers analyze --help\n"),
        (["bad.csv"],
         "everstep: bad.csv: columns missing: step, op, start, duration; it has rank\n"),
        (["one.csv"],
         "everstep: one.csv: it has one rank only: there is nothing to compare with\n"),
        (["two.csv", "--html", "no/such/t.html"],
         "everstep: no/such/t.html cannot be written: No such file or directory\n"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line_and_code_2(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], complaint: str
) -> None:
    (home / "bad.csv").write_text("rank\n1\n")
    written(home / "one.csv", data_parallel(ranks=1))
    written(home / "two.csv", data_parallel(ranks=2))
    code, out, err = called(capsys, *arguments)
    assert (code, out, err) == (2, "", complaint)


def test_the_simulator_writes_what_its_columns_say(tmp_path: Path) -> None:
    plan = Plan(1, data=2, pipeline=2, steps=2)
    path = columns_written(tmp_path / "t.csv", simulate(plan).columns)
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["rank"] for row in rows} == {"0", "1", "2", "3"}
    forwards = [row for row in rows if row["op"] == "forward"]
    assert len(forwards) == plan.ranks * plan.steps * plan.microbatches
