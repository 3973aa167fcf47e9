"""Dependencies read from a trace's order, and steps replayed without what is slow."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.straggler_traces.distributions import PLAIN, VARIABLE, Noise, Slow
from benchmarks.straggler_traces.simulator import Plan, orders, simulate
from everstep_services.straggler.domain import whatif
from everstep_services.straggler.domain.dependencies import schedule_of, trace_of
from everstep_services.straggler.domain.operations import Operations
from everstep_services.straggler.traces import read_traces
from tests.unit.straggler.traces import Row, data_parallel, simulated, written

QUIET = Noise(jitter=0, unequal=0, drift=0, collected=0, checkpoint_every=0, transfers=0)


def table_of(path: Path, rows: Sequence[Row]) -> Operations:
    return read_traces([written(path, rows)]).table


def without(parts: whatif.Decomposed, rank: int) -> float:
    trace = parts.trace
    rows, peers = np.flatnonzero(trace.rank == rank), np.flatnonzero(trace.rank != rank)
    variant = whatif.like_peers(parts, rows, peers, np.ones(len(trace.table)))
    return whatif.outcome_of(parts, [variant]).price(0)


def test_without_the_slow_rank_of_four_a_step_is_shorter_by_what_it_lost(tmp_path: Path) -> None:
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", data_parallel(slow=2))))
    assert parts.error.max() < 1e-9
    assert without(parts, 2) == pytest.approx(1.402 / 1.102 - 1, rel=0.01)
    assert without(parts, 1) == pytest.approx(0, abs=0.001)


def test_waiting_is_nobodys_own(tmp_path: Path) -> None:
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", data_parallel(slow=2))))
    waits = parts.trace.kinds != 0
    assert parts.work_s[waits] == pytest.approx(0.1)
    assert parts.lag_s == pytest.approx(0, abs=1e-9)


def test_time_outside_of_all_operations_is_the_ranks_own(tmp_path: Path) -> None:
    rows = data_parallel(slow=2)
    only_transfers = [row for row in rows if row[2] != "compute"]
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", only_transfers)))
    later = parts.trace.table.step > 0
    slow = later & (parts.trace.rank == 2)
    assert parts.lag_s[slow] == pytest.approx(1.301, abs=0.002)
    assert parts.lag_s[later & ~slow] == pytest.approx(1.001, abs=0.002)


def test_a_transfer_beside_computations_holds_up_only_what_always_waited_for_it(
    tmp_path: Path,
) -> None:
    """As DDP does: a bucket is reduced while the next one is computed."""
    rows: list[Row] = []
    for step in range(8):
        for rank in range(3):
            begin, wait = 10.0 * step, 0.01 * ((step + rank) % 3)
            rows += [
                (rank, step, "first", begin, 1 + wait, ""),
                (rank, step, "second", begin + 1 + wait, 2 - wait, ""),
                (rank, step, "all_reduce", begin + 1 + wait, 1.02 - wait + 0.5, "world"),
                (rank, step, "update", begin + 3, 1, ""),
            ]
    trace = trace_of(table_of(tmp_path / "t.csv", rows))
    (edges,) = trace.edges.values()
    names = [trace.table.ops[op] for op in trace.table.op[:4]]
    pairs = {(names[a], names[b]) for a, b in zip(*edges, strict=True)}
    assert pairs == {("first", "second"), ("second", "update"), ("first", "all_reduce"),
                     ("all_reduce", "update")}  # fmt: skip
    assert whatif.decompose(trace).error.max() < 1e-9


def test_a_collective_that_is_seen_to_end_late_is_waited_for_all_the_same(tmp_path: Path) -> None:
    """As gloo's threads are, on a busy host: the rank that they woke has gone on by then."""
    rows = [
        (rank, step, op, start, took + (0.002 if op == "all_reduce" and (rank + step) % 3 else 0),
         group)
        for rank, step, op, start, took, group in data_parallel(slow=2)
    ]  # fmt: skip
    rows += [(rank, step, "update", start + took - (0.002 if (rank + step) % 3 else 0), 0.01, "")
             for rank, step, op, start, took, group in rows if op == "all_reduce"]  # fmt: skip
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", rows)))
    update = parts.trace.table.ops.index("update")
    assert parts.lag_s[parts.trace.table.op == update] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
@pytest.mark.parametrize("shown", [True, False], ids=["transfers shown", "computations only"])
def test_pipelines_are_replayed_and_their_schedules_are_recognised(
    tmp_path: Path, schedule: str, *, shown: bool
) -> None:
    plan = Plan(3, data=2, pipeline=4, steps=6, schedule=schedule, transfers_shown=shown)
    trace = trace_of(simulated(tmp_path / "t.csv", plan))
    names = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B"}
    assert schedule_of(trace) == names[schedule]
    parts = whatif.decompose(trace)
    assert parts.error.max() < 1e-4
    assert len(parts.kept) == 6


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_every_microbatch_is_done_once_on_each_chunk(schedule: str) -> None:
    plan = Plan(0, pipeline=4, schedule=schedule)
    for order in orders(plan):
        assert len(order) == len(set(order)) == 2 * plan.microbatches * plan.chunks


PLANS = st.builds(
    Plan,
    seed=st.integers(0, 10_000),
    data=st.just(4),
    pipeline=st.sampled_from([1, 2, 4]),
    microbatches=st.sampled_from([4, 8]),
    steps=st.just(24),
    schedule=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    noise=st.sampled_from([QUIET, PLAIN, VARIABLE]),
    transfers_shown=st.booleans(),
    lengths_shown=st.booleans(),
    last_stage=st.sampled_from([0.0, 0.2]),
).map(lambda plan: replace(plan, schedule="1f1b") if plan.pipeline == 1 else plan)


@settings(max_examples=12)
@given(plan=PLANS, rank=st.integers(0, 15), ratio=st.floats(0.1, 1.0), path=st.uuids())
def test_prices_are_those_of_the_simulated_truth(
    tmp_path_factory: pytest.TempPathFactory, plan: Plan, rank: int, ratio: float, path: object
) -> None:
    """All shapes; how well over hundreds of trainings: `python -m benchmarks.stragglers`."""
    slow = Slow(rank % plan.ranks, ratio)
    folder = tmp_path_factory.mktemp("plan")
    with_it = replace(plan, slow=(slow,))
    table = simulated(folder / "t.csv", with_it)
    parts = whatif.decompose(trace_of(table))
    trace = parts.trace
    stage = slow.rank // plan.data
    rows = np.flatnonzero(trace.rank == slow.rank)
    peers = np.flatnonzero((trace.rank // plan.data == stage) & (trace.rank != slow.rank))
    variant = whatif.like_peers(parts, rows, peers, np.ones(len(trace.table)))
    price = whatif.outcome_of(parts, [variant]).price(0)
    truth = simulate(with_it).total_s / simulate(plan).total_s - 1
    assert (1 + price) / (1 + truth) == pytest.approx(1, abs=0.08)


def test_all_alike_is_the_mean_of_computations_and_the_median_of_transfers(tmp_path: Path) -> None:
    rows = data_parallel(steps=6, slow=1)
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", rows)))
    ideal = whatif.ideal(parts)
    took = np.array([row[4] for row in rows if row[2] == "compute"])
    compute = parts.trace.kinds == 0
    assert ideal.work_s[compute] == pytest.approx(took.mean())
    assert ideal.work_s[~compute] == pytest.approx(0.1)
    outcome = whatif.outcome_of(parts, [ideal])
    assert outcome.price(0) == pytest.approx(1.402 / (took.mean() + 0.1) - 1, rel=0.01)


def test_a_step_that_contradicts_the_order_of_the_others_is_left_out(tmp_path: Path) -> None:
    rows = data_parallel(steps=200, ranks=4)
    begin = next(row[3] for row in rows if row[1] == 111)
    # In one step the collective is over before its rank has computed: no dependency explains that.
    bad = [
        (rank, step, op, begin if op == "all_reduce" and step == 111 else start, took, group)
        for rank, step, op, start, took, group in rows
    ]
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", bad)))
    assert 111 not in parts.trace.steps[parts.kept]
    assert len(parts.kept) == 199


def test_a_large_trace_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whatif, "_MOST_CELLS", 500)
    parts = whatif.decompose(trace_of(table_of(tmp_path / "t.csv", data_parallel(60, slow=0))))
    outcome = whatif.outcome_of(parts, [whatif.ideal(parts)])
    assert 4 <= len(outcome.steps) < 60
    assert outcome.price(0) == pytest.approx(1.402 / 1.176 - 1, rel=0.05)
