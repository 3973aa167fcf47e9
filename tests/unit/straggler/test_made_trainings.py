"""Trainings of a second generator: the total slow-down, the culprit, and nobody else."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.made_trainings import mistakes, reported
from everstep_services.cli.__main__ import main
from everstep_services.straggler.domain.analysis import analyze
from everstep_services.straggler.domain.collectives import matched
from everstep_services.straggler.domain.operations import Operations, without_enclosing
from everstep_services.straggler.traces import read_traces
from tests.fakes import training_traces as made
from tests.unit.straggler.traces import columns_written, data_parallel, written


@pytest.mark.parametrize("kind", made.KINDS)
@pytest.mark.parametrize("seed", [4])
def test_slow_down_and_culprit_are_those_of_the_truth(kind: str, seed: int, tmp_path: Path) -> None:
    training = made.made(kind, seed)
    report = reported(training, tmp_path / "trace.parquet")
    assert list(mistakes(training, report)) == []
    assert report.slowdown_ratio == pytest.approx(training.slowdown, rel=0.01)
    assert "laid end to end" in report.notes[0]


def _made_table(tmp_path: Path) -> Operations:
    path = columns_written(tmp_path / "trace.csv", made.columns(made.made("uneven sequences", 2)))
    return read_traces([path]).table


def test_groups_follow_from_who_takes_part(tmp_path: Path) -> None:
    """Nobody names them; none of a group's ranks may end before another has begun."""
    table = _made_table(tmp_path)
    keys, ranks = matched(table), len(np.unique(table.rank))
    stages = len({place.pipeline for place in table.places.values()})
    sizes = {
        name: set(np.unique(keys[table.op == number], return_counts=True)[1])
        for number, name in enumerate(table.ops)
    }
    assert sizes["grads-reduce-scatter"] == {ranks // stages}
    assert sizes["embedding-grads-all-reduce"] == {2}
    assert sizes["layernorm-grads-all-reduce"] == {1}
    assert sizes["optimizer-clip-main-grad"] == {ranks}


def test_an_operation_without_length_encloses_and_deletes_nothing(tmp_path: Path) -> None:
    rows = [("forward", 0.0, 1.0), ("gc", np.float32(0.9999999), 0.0), ("backward", 1.0, 2.0)]
    lines = [(rank, 0, op, start, took, "") for rank in (0, 1) for op, start, took in rows]
    table, left_out = without_enclosing(read_traces([written(tmp_path / "t.csv", lines)]).table)
    assert (len(table), left_out) == (6, 0)


def test_a_slow_rank_that_no_rank_waits_for_is_no_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 2 waits for the slowest of the others before the collective, which the table lacks."""
    rows = []
    for step in range(24):
        for rank in range(8):
            took = 1.3 if rank == (0, 1, 3, 4, 5, 6, 7)[step % 7] else 1.0
            begin = 2.0 * step + (1.3 if rank == 2 else took)
            rows.append((rank, step, "compute", 2.0 * step, took, ""))
            rows.append((rank, step, "all_reduce", begin, 2.0 * step + 2.0 - begin, "world"))
    path = written(tmp_path / "trace.csv", rows)
    code = main(["stragglers", "analyze", str(path)])
    report = analyze(read_traces([path]).table)
    assert (code, report.findings) == (0, ())
    assert "ranks 2 take longer than their peers, and no rank waits for them" in report.notes
    assert "no rank waits" in capsys.readouterr().out


def test_less_than_nothing_is_no_price(tmp_path: Path) -> None:
    report = analyze(read_traces([written(tmp_path / "t.csv", data_parallel(slow=2))]).table)
    prices = [row.price_ratio for row in report.rank_rows]
    prices += [row.price_ratio for row in report.operations]
    assert all(price is None or price >= 0 for price in prices)


def test_minus_one_is_none_in_columns_that_may_be_empty(tmp_path: Path) -> None:
    head = ("rank", "step", "optype", "start_ts", "duration", "mb_id", "seq_id", "tokens")
    rows = [(rank, 0, "compute", 0.0, 1.0, -1, -1, -1) for rank in (0, 1)]
    table = read_traces([written(tmp_path / "t.csv", rows, head)]).table
    assert (set(table.microbatch), set(table.sequence)) == ({-1}, {-1})
    assert table.tokens is None
