"""However what arrives is cut, each message is heard once, whole, and in its order."""

import asyncio
import gc
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from everstep.bus.nats_patches import PatchedClient, dispose
from tests.waiting import WITHIN_S

QUICK, SLOW = 1, 2
BODIES = st.binary(max_size=40) | st.sampled_from([b"\r\n", b"MSG a 1 3\r\nabc\r\n", b"PING\r\n"])
MESSAGES = st.lists(
    st.tuples(st.sampled_from([QUICK, SLOW]), BODIES, st.sampled_from(["", "reply", "headers"])),
    max_size=12,
)


class Client(PatchedClient):
    """One whose first subscription is heard at once, and whose second is nats-py's."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[tuple[int, str, bytes]] = []
        self.replies: list[str] = []
        self.failed: list[Exception] = []
        self.fails_on = b""
        for sid in (QUICK, SLOW):
            self._subs[sid] = Subscription(self, sid, f"s{sid}")
        self.hear_at_once(self._subs[QUICK], self._hear)

    def _hear(self, subject: str, reply: str, data: bytes) -> None:
        if self.fails_on and data == self.fails_on:
            raise ValueError(data)
        self.heard.append((QUICK, subject, data))
        self.replies.append(reply)

    def _build_message(self, sid: int, subject: bytes, *rest: object) -> Msg:
        """What nats-py would queue, which nobody takes from the queue here."""
        _, data, _ = rest
        assert isinstance(data, bytes)
        self.heard.append((sid, subject.decode(), data))
        return None  # type: ignore[return-value]

    async def hear_failed(self, error: Exception) -> None:
        self.failed.append(error)


def frame(sid: int, subject: str, body: bytes, kind: str) -> bytes:
    """As the server writes it."""
    headers = b"NATS/1.0\r\nA: b\r\n\r\n"
    name = subject.encode()
    if kind == "headers":
        size = len(headers) + len(body)
        return b"HMSG %s %d %d %d\r\n%s%s\r\n" % (name, sid, len(headers), size, headers, body)
    reply = b"" if kind == "" else b"back.to.us "
    return b"MSG %s %d %s%d\r\n%s\r\n" % (name, sid, reply, len(body), body)


async def parsed(client: Client, data: bytes, cuts: list[int]) -> None:
    ends = [*sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in zip([0, *ends], ends, strict=False):
        await client._ps.parse(data[begin:end])


@given(MESSAGES, st.lists(st.integers(0, 1000), max_size=8))
async def test_every_message_is_heard_once_and_in_order(
    messages: list[tuple[int, bytes, str]], cuts: list[int]
) -> None:
    client = Client()
    frames = [frame(sid, f"a.{n}", body, how) for n, (sid, body, how) in enumerate(messages)]
    await parsed(client, b"".join(frames), cuts)
    assert client.heard == [(sid, f"a.{n}", body) for n, (sid, body, _) in enumerate(messages)]
    at_once = [how for sid, _, how in messages if sid == QUICK and how != "headers"]
    assert client.replies == ["back.to.us" if how == "reply" else "" for how in at_once]


async def test_who_cannot_take_one_in_hears_the_next() -> None:
    client = Client()
    client.fails_on = b"bad"
    bodies = [b"one", b"bad", b"two", b"bad"]
    await parsed(client, b"".join(frame(QUICK, "a", body, "") for body in bodies), [45])
    assert [data for _, _, data in client.heard] == [b"one", b"two"]
    assert len(client.failed) == 2


async def test_nobody_hears_at_once_what_came_after_a_message_that_waits() -> None:
    client = Client()
    subscription = client._subs[QUICK]
    subscription._pending_queue.put_nowait(Msg(client))
    assert client.hear_of(QUICK) is None
    subscription._pending_queue.get_nowait()
    assert client.hear_of(QUICK) is not None
    client._remove_sub(QUICK)
    assert client.hear_of(QUICK) is None


async def test_what_was_begun_on_an_old_connection_does_not_go_on() -> None:
    client = Client()
    whole = frame(QUICK, "a", b"one", "")
    await client._ps.parse(whole[:-4])
    client._ps.reset()
    await client._ps.parse(whole)
    assert [data for _, _, data in client.heard] == [b"one"]


async def test_the_connection_of_a_handshake_that_failed_is_closed_before_the_next() -> None:
    """Nothing is left to the garbage collector, which would warn of it (A14.4)."""
    writers: list[asyncio.StreamWriter] = []
    refused = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(b"INFO {}\r\n")
        await reader.readline()
        if len(writers) > 1:
            writer.write(b"-ERR 'Authorization Violation'\r\n")
            with suppress(ConnectionResetError):
                await reader.read()  # until the client closes it
        else:
            writer.write(b"PONG\r\n")
        if len(writers) > 3:
            refused.set()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = PatchedClient()
        await client.connect(f"nats://127.0.0.1:{port}", reconnect_time_wait=0.01)
        await asyncio.wait_for(refused.wait(), WITHIN_S)
        await dispose(client)
        for writer in writers:
            with suppress(ConnectionError):
                await asyncio.wait_for(writer.wait_closed(), WITHIN_S)
    gc.collect()


@pytest.mark.parametrize(
    ("servers", "ping_s"), [([], 15.0), (["a:1"], 15.0), (["a:1", "b:1"], 2.0)]
)
async def test_a_client_that_knows_other_servers_pings_often(
    servers: list[str], ping_s: float
) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"INFO " + msgspec.json.encode({"connect_urls": servers}) + b"\r\n")
        await reader.readline()
        writer.write(b"PONG\r\n")
        await reader.read()  # until the client closes it
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        client = PatchedClient()
        port = server.sockets[0].getsockname()[1]
        await client.connect(f"nats://127.0.0.1:{port}", ping_interval=15)
        assert client.options["ping_interval"] == ping_s
        await dispose(client)
