"""A connection by itself: who is set up on a new client, and from when on it is connected."""

import asyncio
from contextlib import AsyncExitStack
from functools import partial

import pytest
from nats import errors as nats_errors

from everstep.bus import connection
from everstep.bus.connection import Connection
from everstep.bus.errors import BusUnreachableError
from everstep.bus.settings import BusSettings


class Client:
    """As much of nats-py's as opening needs."""

    is_closed = False
    is_connected = True

    def __init__(self, *_: object) -> None:
        self.options: dict[str, object] = {}


class Attached:
    def __init__(self, goes_on: asyncio.Event | None = None) -> None:
        self.times = 0
        self.goes_on = goes_on
        self.begun = asyncio.Event()

    async def attach(self, _client: object) -> None:
        self.times += 1
        self.begun.set()
        if self.goes_on is not None:
            await self.goes_on.wait()


class Refused:
    async def attach(self, _client: object) -> None:
        raise nats_errors.ConnectionClosedError


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Connection:
    async def nothing(*_: object) -> None:
        """There is no server."""

    monkeypatch.setattr(connection, "PatchedClient", Client)
    monkeypatch.setattr(connection, "dispose", nothing)
    for name in ("_connect", "_check"):
        monkeypatch.setattr(Connection, name, nothing)
    return Connection(BusSettings(), "test")


async def test_nobody_is_passed_over_when_another_leaves_or_comes_meanwhile(
    opened: Connection,
) -> None:
    first, second, third, late = Attached(asyncio.Event()), Attached(), Attached(), Attached()
    async with AsyncExitStack() as leaving, AsyncExitStack() as staying:
        await leaving.enter_async_context(opened.attached(first))
        for one in (second, third):
            await staying.enter_async_context(opened.attached(one))
        opening = asyncio.create_task(opened.open())
        await first.begun.wait()
        await leaving.aclose()
        await staying.enter_async_context(opened.attached(late))
        assert first.goes_on is not None
        first.goes_on.set()
        await opening
        assert [one.times for one in (first, second, third, late)] == [1, 1, 1, 1]


async def test_a_client_that_is_closed_while_it_is_set_up_is_tried_again(
    opened: Connection,
) -> None:
    async with opened.attached(Refused()):
        with pytest.raises(BusUnreachableError, match="connection closed"):
            await opened.open()


async def test_it_is_not_connected_before_it_says_that_it_has_come_back(opened: Connection) -> None:
    """A caller that sees it connected sees also that it was away."""
    seen = []
    for happens in (opened.open, partial(_lose, opened), opened._reconnected):
        await happens()
        seen.append(opened.connected)
    assert seen == [True, False, True], "nats-py was all the time, but nobody heard of it"
    assert opened.counters["reconnects"] == 1


async def _lose(of: Connection) -> None:
    of._settings = BusSettings(reconnect_jitter_s=0.0)
    await of._disconnected()
