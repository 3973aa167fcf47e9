"""Clients leave a server that hangs or is cut off, and spread again when it is back."""

import asyncio
import random
from contextlib import AsyncExitStack
from functools import partial
from operator import not_

import msgspec
import pytest

from everstep import subjects
from everstep.bus import connect
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError, BusTimeoutError
from everstep.bus.server.copies import ServerWatch
from everstep.ids import new_id
from everstep.messages import StandBy
from tests.cluster.servers import NAMES, Cluster
from tests.waiting import until_async

CLIENTS = 6


def server_of(cluster: Cluster, bus: NatsBus) -> str:
    """The server that a client is connected to; empty while it is not."""
    found = bus.jetstream.connection.client.connected_url
    netloc = found.netloc if found is not None and bus.connected else ""
    return next((n for n, it in cluster.servers.items() if it.front.address == netloc), "")


async def moved(cluster: Cluster, bus: NatsBus, *names: str, within_s: float) -> None:
    await until_async(
        lambda: server_of(cluster, bus), "it is connected to another server",
        holds=names.__contains__, within_s=within_s,
    )  # fmt: skip


async def writes(bus: NatsBus) -> bool:
    await bus.prove()
    return True


async def knows_all(bus: NatsBus) -> bool:
    await bus.prove_servers()
    return True


def others(name: str) -> list[str]:
    return [other for other in NAMES if other != name]


async def test_a_server_that_hangs_is_left_without_a_farewell(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    """A power cut closes no connection. TLS alone would wait 30 s for the server's last word."""
    settings = cluster.settings("service", ping_interval_s=0.2, reconnect_jitter_s=0.01)
    async with connect(settings, "test") as bus:
        first = server_of(cluster, bus)
        await asyncio.to_thread(cluster.servers[first].front.hang)
        await moved(cluster, bus, *others(first), within_s=15)
        await bus.prove()
    assert not [text for text in caplog.messages if "eof_received" in text]


@pytest.mark.parametrize("how", ["cut", pytest.param("hang", marks=pytest.mark.chaos)])
async def test_a_server_that_is_cut_off_from_the_others_is_left(cluster: Cluster, how: str) -> None:
    """It answers its clients as before. Hung routes end after pings that nobody answers."""
    settings = cluster.settings("service", reconnect_jitter_s=0.01)
    async with connect(settings, "test") as bus:
        first = server_of(cluster, bus)
        await asyncio.to_thread(cluster.isolate, first, how)
        await moved(cluster, bus, *others(first), within_s=40)
        await until_async(partial(writes, bus), "it writes", despite=(BusError,))


async def test_a_server_that_acknowledges_no_write_is_left(cluster: Cluster) -> None:
    """Whatever the servers report about each other: here they report nothing."""
    settings = cluster.settings("service", request_within_s=0.5, reconnect_jitter_s=0.01)
    async with connect(settings, "test") as bus:
        first = server_of(cluster, bus)
        bus.jetstream.connection.client._on_servers = None
        await asyncio.to_thread(cluster.isolate, first)
        await until_async(partial(writes, bus), "it writes", despite=(BusError,))
        assert server_of(cluster, bus) != first


async def test_what_was_sent_to_a_leader_that_is_cut_off_fails_when_the_cut_is_known(
    cluster: Cluster,
) -> None:
    """Long before its time is up: another server leads soon, and the caller asks that one."""
    leader = await asyncio.to_thread(cluster.leader, "KV_PROBE")
    settings = cluster.settings("service", others(leader)[0], request_within_s=600.0)
    async with connect(settings, "test") as bus:
        await asyncio.to_thread(cluster.isolate, leader)
        await until_async(partial(writes, bus), "it writes", despite=(BusError,))


async def test_a_node_behind_a_cut_server_is_not_gone(
    cluster: Cluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other servers report at once that nobody subscribes there."""
    subject, order = subjects.order(job, "n1"), StandBy(id=new_id(), job=job, round=1, reason="")
    agents = await cluster.grant(job)
    settings = cluster.settings("service", "a", reconnect_jitter_s=0.01)
    at_c = msgspec.structs.replace(agents, url=cluster.settings("service", "c").url)
    async with connect(settings, "rendezvous") as bus:
        async with connect(at_c, "agent") as agent, agent.subscribe(subject, StandBy):
            assert await bus.deliver(subject, order, within_s=10)
            await asyncio.to_thread(cluster.isolate, "c", "cut")
            await until_async(
                lambda: bus.deliver(subject, order, within_s=0.5),
                "it is heard by way of another server",
                holds=lambda is_there: is_there or pytest.fail("it was taken for gone"),
                despite=(BusError,),
            )
        await asyncio.to_thread(cluster.heal)
        monkeypatch.setattr("everstep.bus.client.SERVER_GRACE_S", 0.1)
        await until_async(
            lambda: bus.deliver(subject, order, within_s=0.5),
            "it is known to be gone", holds=not_, despite=(BusError,),
        )  # fmt: skip


async def test_a_server_that_is_silent_proves_that_nothing_is_known_of_its_clients(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = await asyncio.to_thread(cluster.leader, "KV_PROBE")
    near, away = others(leader)
    async with connect(cluster.settings("service", near), "health") as bus:
        await bus.prove_servers()
        await asyncio.to_thread(cluster.isolate, away)
        await bus.prove(0)  # most servers are reached
        with pytest.raises(BusTimeoutError, match="its clients may be alive"):
            await until_async(bus.prove_servers, "never", holds=lambda _: False)
        monkeypatch.setattr("everstep.bus.client.SERVER_GRACE_S", 1.6)
        await until_async(
            partial(knows_all, bus), "after a while its clients have left it", despite=(BusError,)
        )


async def test_a_server_that_is_away_shows_in_metrics(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("everstep.bus.server.copies._LOOK_EVERY_S", 0.2)
    async with AsyncExitStack() as stack:
        bus = await stack.enter_async_context(connect(cluster.settings("service"), "history"))
        watch = ServerWatch(bus.jetstream)
        stack.callback(asyncio.create_task(watch.look_for_ever()).cancel)
        await until_async(
            watch.statistics, "all are seen",
            holds=lambda it: it["seen"] == 3 and not it["streams_without_leader"],
        )  # fmt: skip
        gone = next(name for name in NAMES if name != server_of(cluster, bus))
        await asyncio.to_thread(cluster.servers[gone].kill)
        await until_async(
            watch.statistics, "one is away, and not behind as well",
            holds=lambda it: (it["away"], it["lagging"]) == (1, 0),
        )  # fmt: skip


async def test_clients_return_to_a_server_that_has_come_back(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random, "random", lambda: 0.0)
    monkeypatch.setattr("everstep.bus.server.choice._SPREAD_S", 0.1)
    settings = cluster.settings("service", reconnect_jitter_s=0.01, reconnect_wait_s=0.1)
    async with AsyncExitStack() as stack:
        buses = [
            await stack.enter_async_context(connect(settings, f"test-{number}"))
            for number in range(CLIENTS)
        ]
        gone = server_of(cluster, buses[0])
        await asyncio.to_thread(cluster.servers[gone].kill)
        for bus in buses:
            await moved(cluster, bus, *others(gone), within_s=20)
        await asyncio.to_thread(cluster.servers[gone].start)
        for bus in buses:
            await moved(cluster, bus, gone, within_s=30)
