"""How long a writer of facts waits while retention removes old jobs: with and without it.

python -m benchmarks.retention [--facts 60000] [--postgres URL]
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from everstep.messages import ProgressMade, kind_of
from everstep.messages.codec import encode
from everstep.store.database import Database, open_database
from everstep.store.job_removal import JobRemovals, Removal
from everstep.store.log import FactLog, NewFact
from everstep.store.schema import upgrade
from everstep_services.history.projections.fold import fold
from everstep_services.history.retention import PagePace

_JOBS = 30
_BATCH = 100
_WRITES = 200
_EVERY_S = 0.02


def facts(job: str, first: int, count: int) -> list[NewFact]:
    """Facts of a job that trains."""
    batch = []
    for number in range(first, first + count):
        fact = ProgressMade(
            id=f"{job}-{number}", job=job, at=datetime.now(UTC), source="agent/n0", round=1,
            step=number, is_first=number == first,
        )  # fmt: skip
        batch.append(
            NewFact(
                number, fact.id, job, kind_of(fact), 1, None, 1, fact.source,
                encode(fact).decode(), fact,
            )
        )  # fmt: skip
    return batch


async def fill(log: FactLog, count: int) -> None:
    for job in range(_JOBS):
        for first in range(0, count // _JOBS, 2000):
            size = min(2000, count // _JOBS - first)
            batch = facts(f"old-{job}", first, size)
            await log.append("s", batch, sequence=1, received_us=1)


async def writes(log: FactLog, job: str) -> list[float]:
    """The seconds that each batch took to be written."""
    took = []
    for number in range(_WRITES):
        batch = facts(job, number * _BATCH, _BATCH)
        began = time.perf_counter()
        await log.append("s", batch, sequence=1, received_us=2)
        took.append(time.perf_counter() - began)
        await asyncio.sleep(_EVERY_S)
    return took


async def remove_all(database: Database) -> tuple[int, float]:
    """Remove the old jobs as the service does; how many rows, and the longest page."""
    removals, rows, longest = JobRemovals(database), 0, 0.0
    for job in range(_JOBS):
        await removals.begin(f"old-{job}", 1)
        removal, pace, is_more = Removal(f"old-{job}"), PagePace(), True
        while is_more:
            began = time.perf_counter()
            is_more = await removals.remove_some(removal, pace.rows)
            took_s = time.perf_counter() - began
            longest = max(longest, took_s)
            await asyncio.sleep(pace.rest_s(took_s))
        await removals.finish(removal.job)
        rows += removal.rows
    return rows, longest


def shown(name: str, took: Sequence[float]) -> None:
    times = sorted(took)
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    print(
        f"{name:<34} p50 {p50 * 1e3:6.1f} ms   p99 {p99 * 1e3:6.1f} ms   "
        f"max {times[-1] * 1e3:6.1f} ms   ({len(times)} batches of {_BATCH})"
    )


async def measure(url: str, count: int) -> None:
    async with open_database(url) as database:
        await upgrade(database)
        log = FactLog(database, fold)
        began = time.perf_counter()
        await fill(log, count)
        print(
            f"{database.kind}: {count} facts of {_JOBS} jobs in {time.perf_counter() - began:.0f} s"
        )
        shown("writer alone", await writes(log, "alone"))
        began = time.perf_counter()
        removing = asyncio.create_task(remove_all(database))
        shown("writer while old jobs are removed", await writes(log, "beside"))
        rows, longest = await removing
        took_s = time.perf_counter() - began
        print(f"{rows} rows removed in {took_s:.1f} s, longest page {longest * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--facts", type=int, default=60_000)
    parser.add_argument("--postgres", default="")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(f"sqlite:///{Path(folder) / 'history.db'}", asked.facts))
    if asked.postgres:
        asyncio.run(measure(asked.postgres, asked.facts))


if __name__ == "__main__":
    main()
