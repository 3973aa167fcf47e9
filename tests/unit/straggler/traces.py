"""Small traces of operations, written as rows."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.straggler_traces.simulator import Plan, simulate
from everstep_services.straggler.domain.operations import Operations
from everstep_services.straggler.traces import read_traces

HEAD = ("rank", "step", "op", "start", "duration", "group")
Row = Sequence[Any]


def written(path: Path, rows: Iterable[Row], head: Sequence[str] = HEAD) -> Path:
    """A CSV file of these rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        writer.writerows(["" if one is None else one for one in row] for row in rows)
    return path


def columns_written(path: Path, columns: Mapping[str, Sequence[Any]]) -> Path:
    return written(path, zip(*columns.values(), strict=True), list(columns))


def simulated(path: Path, plan: Plan) -> Operations:
    """The table of a simulated training, written to a file and read."""
    return read_traces([columns_written(path, simulate(plan).columns)]).table


def data_parallel(
    steps: int = 12, ranks: int = 4, slow: int | None = None, compute: float = 1.0,
    transfer: float = 0.1, by: float = 0.3,
) -> list[Row]:  # fmt: skip
    """Computations, then a collective that waits for all; one rank takes `by` longer."""
    rows: list[Row] = []
    begin = 0.0
    for step in range(steps):
        took = [compute + (by if rank == slow else 0) + 0.001 * ((rank + step) % 3)
                for rank in range(ranks)]  # fmt: skip
        end = begin + max(took) + transfer
        for rank in range(ranks):
            rows.append((rank, step, "compute", begin, took[rank], ""))
            rows.append((rank, step, "all_reduce", begin + took[rank],
                         end - begin - took[rank], "world"))  # fmt: skip
        begin = end
    return rows
