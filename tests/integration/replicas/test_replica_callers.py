"""Callers that are slow, lie, or die in the middle."""

import asyncio
import contextlib
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import xxhash
from msgspec.structs import replace

from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.transfer import context as standings
from everstep_services.agent.replicas.transfer import protocol
from everstep_services.agent.replicas.transfer.protocol import (
    AskHolding,
    Copy,
    Hello,
    HoldingAnswer,
    PutCopy,
    ReplicaError,
    ReplicaLink,
    SendFrom,
    StoredAnswer,
)
from tests.integration.replicas.nodes import JOB, KEY, SIZE, Node, made, order, running, state_of
from tests.waiting import until_async
from trainer_sdk.checkpoint.manifest import Identity, ImageIndex, encode


def copy_of(size: int = SIZE) -> Copy:
    """The state of rank 0 after step 10, announced as it is."""
    digest = xxhash.xxh3_128_hexdigest(state_of(0, 10, size))
    identity = Identity(job=JOB, round=1, step=10, world_size=8, layout="l")
    index = ImageIndex(identity=identity, rank=0, size_bytes=size, hash=digest, entries=())
    return Copy(slot=0, rank=0, ranks=1, step=10, size_bytes=size, hash=digest, index=encode(index))


@contextmanager
def calling(port: int, silent_s: float = 30.0) -> Iterator[ReplicaLink]:
    with socket.create_connection(("127.0.0.1", port)) as wire:
        link = ReplicaLink(wire, silent_s=silent_s)
        link.prove(KEY.encode(), is_caller=True)
        link.say(Hello(job=JOB, node="caller", round=1))
        yield link


async def against(node: Node, exchange: Callable[[int], None]) -> None:
    """Say something to a node that is up, as another process would."""
    async with running([node]):
        node.keep.begins(order(1))
        await asyncio.to_thread(exchange, node.port)


async def test_who_dies_in_the_middle_goes_on_where_it_ended(tmp_path: Path) -> None:
    size, holder = 3 << 20, made("holder", tmp_path)
    copy, octets = copy_of(size), memoryview(state_of(0, 10, size))

    def exchange(port: int) -> None:
        with calling(port) as link:
            link.say(PutCopy(copy=copy))
            assert link.hear_answer(SendFrom).offset == 0
            link.send(octets[: size - 100_000])
        with calling(port) as link:
            link.say(AskHolding(ranks=(0,)))
            assert link.hear_answer(HoldingAnswer).copies == ()
        offset, has_it = 0, False
        while not has_it:  # the first connection may not have been noticed to be over
            with calling(port) as link:
                link.say(PutCopy(copy=copy))
                try:
                    offset = link.hear_answer(SendFrom).offset
                except ReplicaError as error:
                    assert error.cause == "busy"
                    continue
                link.send(octets[offset:])
                link.hear_answer(StoredAnswer)
                has_it = True
        assert 2 << 20 <= offset < size

    await against(holder, exchange)
    assert holder.held(0, 0) == {10: octets}


async def test_what_was_announced_otherwise_is_not_taken(tmp_path: Path) -> None:
    holder = made("holder", tmp_path)
    wrong = {
        "another rank": replace(copy_of(), rank=1),
        "another step": replace(copy_of(), step=11),
        "another size": replace(copy_of(), size_bytes=SIZE - 1),
        "no bytes": replace(copy_of(), size_bytes=0),
        "too large": replace(copy_of(), size_bytes=1 << 60),
        "another hash": replace(copy_of(), hash="0" * 32),
        "no index": replace(copy_of(), index=b"{}"),
    }

    def exchange(port: int) -> None:
        for what, copy in wrong.items():
            with calling(port) as link:
                link.say(PutCopy(copy=copy))
                with pytest.raises(ReplicaError) as caught:
                    link.hear_answer(SendFrom)
                assert caught.value.cause in {"foreign", "torn"}, what

    await against(holder, exchange)
    assert not list((tmp_path / "held").rglob("image"))


async def test_whoever_says_nonsense_is_cut_off_and_others_are_heard(tmp_path: Path) -> None:
    holder = made("holder", tmp_path)

    def exchange(port: int) -> None:
        for nonsense in (b"\xff\xff\xff\xff", b"\0\0\0\x04nope", b"\0\0\0\0"):
            with socket.create_connection(("127.0.0.1", port)) as wire:
                link = ReplicaLink(wire, silent_s=30.0)
                link.prove(KEY.encode(), is_caller=True)
                wire.sendall(nonsense)
                assert wire.recv(1) == b""
        with socket.create_connection(("127.0.0.1", port)) as wire:
            wire.sendall(bytes(64))  # no proof
            wire.settimeout(30)
            heard = b""
            with contextlib.suppress(ConnectionError):
                while more := wire.recv(64):
                    heard += more
            assert len(heard) <= 64  # a number and a proof, and nothing else
        with calling(port) as link:
            link.say(AskHolding(ranks=(0,)))
            assert link.hear_answer(HoldingAnswer).copies == ()

    await against(holder, exchange)


async def test_who_sends_less_than_is_agreed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "_GRACE_S", 0.2)
    monkeypatch.setattr(protocol, "_PIECE", 1)  # it looks at the clock after each byte
    fast = CheckpointSettings(room_least_bytes=0, least_mib_s=1000.0, silent_s=10.0)
    holder, never = made("holder", tmp_path, fast), threading.Event()

    def trickle(port: int) -> None:
        with calling(port) as link:
            link.say(PutCopy(copy=copy_of()))
            with pytest.raises((ConnectionError, EOFError)):
                link.hear_answer(SendFrom)
                while True:  # never silent, and never done
                    link.send(memoryview(b"x"))
                    never.wait(0.01)

    await against(holder, trickle)
    assert not holder.held(0, 0)


@contextmanager
def without_descriptors() -> Iterator[None]:
    """This process can open no file and take no connection meanwhile."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def asked_for_copies(wire: socket.socket) -> None:
    link = ReplicaLink(wire, silent_s=30.0)
    link.prove(KEY.encode(), is_caller=True)
    link.say(Hello(job=JOB, node="caller", round=1))
    link.say(AskHolding(ranks=(0,)))
    assert link.hear_answer(HoldingAnswer).copies == ()


async def test_without_descriptors_callers_wait_and_are_served_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    holder = made("holder", tmp_path)
    async with running([holder]):
        holder.keep.begins(order(1))
        await holder.has_offer(1)
        with socket.socket() as wire:
            with without_descriptors():
                wire.connect(("127.0.0.1", holder.port))
                await until_async(
                    lambda: "replica_callers_wait" in caplog.text, "the refusal is noticed"
                )
            await asyncio.to_thread(asked_for_copies, wire)
    assert caplog.text.count("replica_callers_wait") == 1, "said once, however long it lasts"
