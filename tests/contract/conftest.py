"""Each contract test runs twice: over the bus in memory, and over the real server."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.devserver import DevServer
from everstep.bus.ports import Bus
from tests.fakes.bus import MemoryBus, MemoryServer


@pytest.fixture(params=["memory", "nats"])
def server(request: pytest.FixtureRequest) -> DevServer | None:
    """None for the bus in memory. Not async: starting a server would block the loop."""
    return request.getfixturevalue("shared_nats") if request.param == "nats" else None


@pytest.fixture
async def two(server: DevServer | None, tmp_path: Path) -> AsyncIterator[tuple[Bus, Bus]]:
    """Two processes on one bus."""
    if server is None:
        memory = MemoryServer()
        yield MemoryBus(memory), MemoryBus(memory)
        return
    async with AsyncExitStack() as stack:
        settings = server.settings("service")
        one = await stack.enter_async_context(connect(settings, "one", spool=tmp_path / "one"))
        other = await stack.enter_async_context(
            connect(settings, "other", spool=tmp_path / "other")
        )
        yield one, other


@pytest.fixture
def bus(two: tuple[Bus, Bus]) -> Bus:
    return two[0]
