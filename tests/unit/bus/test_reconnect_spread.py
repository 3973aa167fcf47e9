"""A fleet that has lost its server for long does not come back in one moment."""

import random

import pytest
from nats.aio.client import Client

from everstep.bus.nats_patches import PatchedClient


@pytest.mark.parametrize(("status", "waits"), [(Client.RECONNECTING, 1), (Client.CONNECTING, 0)])
async def test_each_attempt_that_fails_is_followed_by_a_random_wait(
    status: int, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A14.2: the waits of nats-py alone are the same for all. The first connection has none."""
    asked: list[tuple[float, float]] = []

    def uniform(least: float, most: float) -> float:
        asked.append((least, most))
        return 0.0

    async def refused(_client: Client, _server: object) -> None:
        raise ConnectionRefusedError

    monkeypatch.setattr(random, "uniform", uniform)
    monkeypatch.setattr(Client, "_connect_to_server", refused)
    client = PatchedClient(spread_s=25.0)
    client._status = status
    with pytest.raises(ConnectionRefusedError):
        await client._connect_to_server(None)  # type: ignore[arg-type]
    assert asked == [(0, 25.0)] * waits
