"""History as a process, while the bus under it is wiped, and while it is away."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from operator import not_
from pathlib import Path

import msgspec
import pytest

from everstep.bus import connect, topology
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from everstep.ids import new_id
from everstep.messages import ProgressMade
from tests.integration.bus.servers import killed_with_its_data, stopped
from tests.processes import history, in_sql, kept_running
from tests.waiting import until_async


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = msgspec.structs.replace(
        nats.settings("service"), reconnect_jitter_s=0.01, reconnect_wait_s=0.05
    )
    async with connect(settings, "test", spool=tmp_path / "spool") as bus:
        await topology.init(bus.jetstream)
        async with kept_running(history(nats, tmp_path)):
            yield bus


async def record(bus: NatsBus, count: int) -> set[str]:
    facts = [
        ProgressMade(id=new_id(), job="j", at=datetime.now(UTC), source="test", round=0, step=step)
        for step in range(count)
    ]
    for fact in facts:
        await bus.record(fact)
    return {fact.id for fact in facts}


async def arrive(folder: Path, ids: set[str]) -> None:
    await until_async(
        lambda: asyncio.to_thread(lambda: ids - set(in_sql(folder))), "all are in SQL", holds=not_
    )


async def test_a_wiped_bus_comes_back_and_the_record_keeps_what_it_had(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    """NATS has lost its data, and the database has every fact once (A11.2, A14.3)."""
    before = await record(bus, 20)
    await arrive(tmp_path, before)
    await killed_with_its_data(nats, tmp_path / "own-nats" / "nats" / "store")
    # Nobody sets the streams up again by hand: history does.
    after = await record(bus, 20)
    await arrive(tmp_path, before | after)
    found = in_sql(tmp_path)
    assert set(found) == before | after
    assert max(found.values()) == 1


async def test_what_was_recorded_while_the_bus_was_away_is_projected_when_it_is_back(
    nats: DevServer, bus: NatsBus, tmp_path: Path
) -> None:
    """Facts wait in spools, and arrive (A11.2)."""
    await arrive(tmp_path, await record(bus, 1))
    await stopped(nats.pid)
    ids = await record(bus, 50)
    os.kill(nats.pid, signal.SIGCONT)
    await arrive(tmp_path, ids)


async def test_a_second_copy_that_the_stream_took_is_not_projected(
    bus: NatsBus, tmp_path: Path
) -> None:
    """As after an outage longer than the stream remembers ids, when an answer was lost."""
    config = (await bus.jetstream.api("STREAM.INFO.FACTS"))["config"]
    short = {**config, "duplicate_window": 100_000_000}
    await bus.jetstream.api("STREAM.UPDATE.FACTS", short)
    fact = ProgressMade(id=new_id(), job="j", at=datetime.now(UTC), source="test", round=0, step=1)

    async def copies() -> int:
        await bus.record(fact)
        await bus.flush(40)
        return int((await bus.jetstream.api("STREAM.INFO.FACTS"))["state"]["messages"])

    await until_async(copies, "the stream takes it once more", holds=lambda n: n >= 2)
    last = await record(bus, 1)
    await arrive(tmp_path, last)
    assert in_sql(tmp_path)[fact.id] == 1
