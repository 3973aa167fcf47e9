"""Server, history and publisher killed at random under load: no fact lost, none twice."""

import asyncio
import os
import random
import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everstep.bus import BusSettings, connect, topology
from everstep.bus.devserver import DevServer, dev_server

Process = asyncio.subprocess.Process


@asynccontextmanager
async def kept_running(make: object) -> AsyncIterator[list[Process]]:
    """A process that is started again whenever it was killed; the list holds the present one."""
    assert callable(make)
    present = [await make()]

    async def again() -> None:
        while True:
            await present[0].wait()
            present[0] = await make()

    async with asyncio.TaskGroup() as tasks:
        keeping = tasks.create_task(again())
        try:
            yield present
        finally:
            keeping.cancel()
            present[0].kill()
            await present[0].wait()


def recorder(nats: DevServer, folder: Path) -> object:
    password = nats.settings("service").password_file

    async def make() -> Process:
        script = Path(__file__).with_name("recorder.py")
        return await asyncio.create_subprocess_exec(
            *[sys.executable, str(script), nats.url, str(password), str(folder)]
        )

    return make


def history(nats: DevServer, folder: Path) -> object:
    settings = nats.settings("service")
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__USER": str(settings.user),
        "EVERSTEP_BUS__PASSWORD_FILE": str(settings.password_file),
        "EVERSTEP_BUS__RECONNECT_WAIT_S": "0.1",
        "EVERSTEP_HISTORY__DATABASE_URL": f"sqlite:///{folder / 'history.db'}",
        "EVERSTEP_HISTORY__LEASE_TTL_S": "2",
        "EVERSTEP_HISTORY__FETCH_WITHIN_S": "0.5",
        "EVERSTEP_HISTORY__RETRY_MOST_S": "0.5",
        "EVERSTEP_API__PORT": "0",
        "EVERSTEP_OBSERVE__PORT": "0",
        "EVERSTEP_LOG__LEVEL": "error",
    }

    async def make() -> Process:
        return await asyncio.create_subprocess_exec(
            *[sys.executable, "-m", "everstep_services.history", "serve"],
            env={**os.environ, **environment},
        )

    return make


def acknowledged(folder: Path) -> set[str]:
    text = (folder / "acknowledged").read_text()
    return set(text[: text.rfind("\n") + 1].split())


def in_sql(folder: Path) -> Counter[str]:
    try:
        with sqlite3.connect(f"file:{folder / 'history.db'}?mode=ro", uri=True) as database:
            return Counter(row[0] for row in database.execute("SELECT id FROM facts"))
    except sqlite3.OperationalError:  # not made yet
        return Counter()


async def grown(read: object, folder: Path, by: int) -> None:
    """Until there is more of something: every part that it takes is alive again."""
    assert callable(read)

    def size() -> int:
        return len(read(folder)) if (folder / "acknowledged").exists() else 0

    began = await asyncio.to_thread(size)
    while await asyncio.to_thread(size) < began + by:
        await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, marks=pytest.mark.timeout(120)),
        pytest.param(50, marks=[pytest.mark.chaos, pytest.mark.timeout(600)]),
    ],
)
async def test_no_acknowledged_fact_is_lost_and_none_is_there_twice(
    tmp_path: Path, kills: int
) -> None:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    dice = random.Random(seed)
    victims: Counter[str] = Counter()
    async with dev_server(tmp_path) as nats:
        async with connect(nats.settings("admin"), "setup") as bus:
            await topology.init(bus.jetstream)
        async with (
            kept_running(history(nats, tmp_path)) as projector,
            kept_running(recorder(nats, tmp_path)) as publisher,
        ):
            await grown(in_sql, tmp_path, 1)
            for _ in range(kills):
                victim = dice.choice(["nats-server", "history", "publisher"])
                victims[victim] += 1
                pids = {
                    "nats-server": nats.pid,
                    "history": projector[0].pid,
                    "publisher": publisher[0].pid,
                }
                try:
                    os.kill(pids[victim], signal.SIGKILL)
                except ProcessLookupError:
                    continue  # between two lives
                await grown(acknowledged, tmp_path, dice.randrange(1, 200))
                if dice.random() < 0.3:  # else the next one dies while this one is away
                    await grown(in_sql, tmp_path, 1)
            (tmp_path / "quiet").touch()
            publisher[0].kill()  # what waits in its spool is sent by its next life
            await everything_arrived(nats, tmp_path)
    found = in_sql(tmp_path)
    print(
        f"killed {dict(victims)}; acknowledged {len(acknowledged(tmp_path))}, in SQL {len(found)}"
    )
    assert not acknowledged(tmp_path) - set(found)
    assert max(found.values()) == 1


async def everything_arrived(nats: DevServer, folder: Path) -> None:
    """Until SQL has all that was acknowledged; the test's own deadline bounds it."""
    settings: BusSettings = nats.settings("service")
    while True:
        missing = await asyncio.to_thread(lambda: acknowledged(folder) - set(in_sql(folder)))
        if not missing:
            return
        async with connect(settings, "watch") as bus:
            await bus.prove()
        await asyncio.sleep(0.1)
