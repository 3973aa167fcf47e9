"""A connection of straggler to the server that tests share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.server.dev_server import DevServer


@pytest.fixture
async def bus(shared_nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "straggler", spool=tmp_path / "spool") as bus:
        yield bus
