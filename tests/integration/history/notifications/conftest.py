"""A bus with its topology, and a target that misbehaves."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.bus import connect, topology
from everstep.bus.auth.roles import ADMIN, SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer
from tests.integration.history.notifications.targets import TargetServer


@pytest.fixture
async def bus(nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    async with connect(nats.settings(ADMIN), "setup", spool=tmp_path / "setup") as bus:
        await topology.init(bus.jetstream)
    async with connect(nats.settings(SERVICE), "history", spool=tmp_path / "spool") as bus:
        yield bus


@pytest.fixture
async def server() -> AsyncIterator[TargetServer]:
    made = TargetServer()
    async with made.up():
        yield made
