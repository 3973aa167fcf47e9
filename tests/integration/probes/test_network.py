"""A measurement between two ends: with the token only, one of each, within its bounds."""

import asyncio
import os
import socket
from collections.abc import Coroutine
from typing import Any

import pytest

from everstep_services.agent.probes.network import collectives, pair_test
from everstep_services.agent.probes.network.collectives import Pair, PairEnd, Sums
from everstep_services.agent.probes.network.pair_test import (
    Address,
    Figures,
    NetworkCheckError,
    judge,
    listen,
    measure,
    read_address,
    read_token,
)
from everstep_services.agent.probes.settings import ChecksSettings

TOKEN = b"a token of one measurement"
WITHIN_S = 30.0
LOOPBACK = Address("127.0.0.1", 0)


class Door:
    """A listener of the test's own, and where it is."""

    def __init__(self, tasks: asyncio.TaskGroup, within_s: float = WITHIN_S) -> None:
        self._open: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self.listening = tasks.create_task(
            listen(LOOPBACK, TOKEN, within_s=within_s, ready=self._open.set_result)
        )

    async def address(self) -> Address:
        return await self._open


async def refused(measuring: Coroutine[Any, Any, Figures]) -> str:
    with pytest.raises(NetworkCheckError) as found:
        await measuring
    return str(found.value)


async def test_two_ends_with_the_token_measure() -> None:
    async with asyncio.TaskGroup() as tasks:
        door = Door(tasks)
        figures = await measure(await door.address(), TOKEN, within_s=WITHIN_S)
        peer = await door.listening
    assert peer.host == "127.0.0.1"
    assert 0 < figures.round_trip_ms < 1000
    assert figures.mib_s > 1


async def test_one_measurement_and_the_door_is_shut() -> None:
    async with asyncio.TaskGroup() as tasks:
        door = Door(tasks)
        at = await door.address()
        await measure(at, TOKEN, within_s=WITHIN_S)
        await door.listening
    assert str(at) in await refused(measure(at, TOKEN, within_s=WITHIN_S))


async def test_strangers_are_refused_and_do_not_get_in_the_way() -> None:
    async with asyncio.TaskGroup() as tasks:
        door = Door(tasks)
        at = await door.address()
        said = await refused(measure(at, b"another token, as long", within_s=WITHIN_S))
        assert said.endswith("it closed the connection; do both nodes have the same token?")
        _, silent_end = await asyncio.open_connection(at.host, at.port)
        garbled, garbage_end = await asyncio.open_connection(at.host, at.port)
        garbage_end.write(os.urandom(4096))
        assert len(await garbled.read(pair_test._NONCE)) > 0
        await measure(at, TOKEN, within_s=WITHIN_S)
        await door.listening
        for end in (silent_end, garbage_end):
            end.close()


async def test_a_peer_that_gives_up_may_come_again() -> None:
    async with asyncio.TaskGroup() as tasks:
        door = Door(tasks)
        at = await door.address()
        link = await pair_test._reach(at)
        await pair_test._prove(link, TOKEN, as_peer=True)
        link.close()
        await measure(at, TOKEN, within_s=WITHIN_S)
        await door.listening


async def test_a_proof_is_good_for_neither_the_other_role_nor_another_time() -> None:
    """A listener that only sends back what it is sent proves nothing."""

    async def mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
        writer.close()

    async with await asyncio.start_server(mirror, "127.0.0.1", 0) as server:
        at = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        assert "do both nodes have the same token?" in await refused(
            measure(at, TOKEN, within_s=WITHIN_S)
        )


async def test_nobody_comes_and_nobody_answers() -> None:
    with pytest.raises(NetworkCheckError, match="no peer with the token came to 127.0.0.1:0 "):
        await listen(LOOPBACK, TOKEN, within_s=0.1, ready=lambda at: None)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = Address("127.0.0.1", silent.getsockname()[1])
        said = await refused(measure(at, TOKEN, within_s=0.2))
    assert said == f"{at} did not answer within 0.2 s"


async def test_what_cannot_be_listened_on_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = Address("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(NetworkCheckError, match="cannot be listened on: Address already"):
            await listen(at, TOKEN, within_s=1, ready=lambda at: None)
    with pytest.raises(NetworkCheckError, match="no.such.host.invalid:1 cannot be listened on"):
        await listen(Address("no.such.host.invalid", 1), TOKEN, within_s=40, ready=lambda at: None)


def test_addresses_and_tokens_are_read() -> None:
    assert read_address("node-07:7411") == Address("node-07", 7411)
    assert read_address("[::1]:5") == Address("::1", 5)
    assert str(Address("::1", 5)) == "[::1]:5"
    for wrong in ("node-07", ":5", "a:b", "a:70000", "a:-1", ""):
        with pytest.raises(NetworkCheckError, match="is not an address: write HOST:PORT"):
            read_address(wrong)
    assert read_token(" 0123456789abcdef\n") == b"0123456789abcdef"
    with pytest.raises(NetworkCheckError) as found:
        read_token("hunter2")
    assert "hunter2" not in str(found.value)


@pytest.mark.parametrize(
    ("limits", "state", "said"),
    [
        ({}, "ok", "0.250 ms, 900 MiB/s"),
        ({"network_least_mib_s": 900}, "ok", ""),
        ({"network_least_mib_s": 901}, "failed", "(least 901 MiB/s)"),
        ({"network_most_ms": 0.25}, "ok", ""),
        ({"network_most_ms": 0.2}, "failed", "(most 0.2 ms)"),
    ],
)
def test_limits_are_kept_only_where_there_are_any(
    limits: dict[str, float], state: str, said: str
) -> None:
    one = judge("n7:1", Figures(0.25, 900), ChecksSettings(**limits))  # type: ignore[arg-type]
    assert (one.state, one.subject) == (state, "n7:1")
    assert said in one.reason


def free() -> Address:
    """Where nobody listens."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        return Address(*held.getsockname())


@pytest.mark.variant
async def test_ends_go_on_with_other_pairs_and_find_out_that_they_differ() -> None:
    ends = [PairEnd(), PairEnd()]

    async def added(*backends: str) -> list[Sums]:
        at = free()
        pairs = (Pair(rank, at.host, at.port, backends[rank], 180.0, 60.0) for rank in range(2))
        return await asyncio.gather(*(end.add(pair) for end, pair in zip(ends, pairs, strict=True)))

    try:
        for backend in ("", "gloo"):
            assert [(sums.backend, sums.trouble) for sums in await added(backend, backend)] == [
                ("gloo", ""),
                ("gloo", ""),
            ]
        assert [sums.trouble for sums in await added("", "nccl")] == [
            "this node would use gloo, and the other one nccl",
            "this node would use nccl, and the other one gloo",
        ]
    finally:
        for end in ends:
            await end.stop()


@pytest.mark.variant
async def test_two_ends_add_tensors_over_gloo_as_two_ranks() -> None:
    """The path of `--over nccl`, but for the device: each end is a process with torch."""
    at = free()
    ends = (
        collectives.compare(at, "gloo", ChecksSettings(), 180.0, is_peer=is_peer)
        for is_peer in (False, True)
    )
    for result in await asyncio.gather(*ends):
        assert (result.state, result.failure_class) == ("ok", ""), result.reason
        assert "gloo: sums are right, " in result.reason


async def test_an_end_without_its_partner_or_its_device_is_unknown() -> None:
    result = await collectives.compare(LOOPBACK, "gloo", ChecksSettings(), 0.01, is_peer=True)
    assert result.state == "unknown"
    assert "did not finish within 0.01 s" in result.reason


def test_a_wrong_sum_and_a_slow_pair_have_failed() -> None:
    settings = ChecksSettings(network_least_mib_s=100)
    for sums, text in (
        (Sums(wrong="3 of 8 sums are wrong", mib_s=900.0), "nccl: 3 of 8 sums are wrong"),
        (Sums(mib_s=99.0), "sums are right, 99 MiB/s (least 100 MiB/s)"),
    ):
        result = collectives.judge(LOOPBACK, "nccl", sums, settings)
        assert (result.state, result.failure_class) == ("failed", "watch")
        assert text in result.reason
    assert collectives.judge(LOOPBACK, "nccl", Sums(100.0), settings).state == "ok"
