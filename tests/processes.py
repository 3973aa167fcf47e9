"""Services as processes of their own, to be killed; and what they left in SQL."""

import asyncio
import os
import sqlite3
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from everstep.bus.server.dev_server import DevServer

Process = asyncio.subprocess.Process
Make = Callable[[], Awaitable[Process]]


@asynccontextmanager
async def kept_running(make: Make) -> AsyncIterator[list[Process]]:
    """A process that is started again whenever it was killed; the list holds the present one."""
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


def history(nats: DevServer, folder: Path) -> Make:
    settings = nats.settings("service")
    environment = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__CREDENTIALS_FILE": str(settings.credentials_file),
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


def in_sql(folder: Path) -> Counter[str]:
    try:
        with sqlite3.connect(f"file:{folder / 'history.db'}?mode=ro", uri=True) as database:
            return Counter(row[0] for row in database.execute("SELECT id FROM facts"))
    except sqlite3.OperationalError:  # not made yet
        return Counter()
