"""The live stream: resumed, reset, limited, and never piling up."""

import asyncio
import json
from collections.abc import AsyncIterator, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from everstep.messages import Fact
from everstep_services.history.fact_decoder import decode_batch
from tests.integration.conftest import Api
from tests.integration.history.queries.sql_queries import counted
from tests.unit.history.facts import delivered, make

WITHIN_S = 20.0


class Listener:
    """One open stream, read event by event. `take = False` stops taking what is sent."""

    def __init__(self) -> None:
        self.status = 0
        self.sent: asyncio.Queue[bytes] = asyncio.Queue()
        self.take = asyncio.Event()
        self.take.set()
        self.gone = asyncio.Event()
        self.is_over = asyncio.Event()
        self._rest = b""

    async def receive(self) -> MutableMapping[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await self.take.wait()
        self.sent.put_nowait(message.get("body", b""))

    async def block(self) -> dict[str, str]:
        """The next event, comment or greeting, by its fields."""
        async with asyncio.timeout(WITHIN_S):
            while b"\n\n" not in self._rest:
                self._rest += await self.sent.get()
        text, _, self._rest = self._rest.partition(b"\n\n")
        fields = (line.partition(":") for line in text.decode().splitlines())
        return {name: value.strip() for name, _, value in fields}

    def forget(self) -> None:
        """Whatever has been sent."""
        self._rest = b""
        while not self.sent.empty():
            self.sent.get_nowait()

    async def facts(self, count: int) -> list[str]:
        """The ids of the next facts."""
        found: list[str] = []
        while len(found) < count:
            event = await self.block()
            if event.get("event") == "fact":
                found.append(json.loads(event["data"])["id"])
        return found


@asynccontextmanager
async def listening(
    api: Api, token: str, query: str = "", last: str | None = None, *, path: str = "facts/stream"
) -> AsyncIterator[Listener]:
    listener = Listener()
    headers = [(b"host", b"everstep.test"), (b"authorization", f"Bearer {token}".encode())]
    if last is not None:
        headers.append((b"last-event-id", last.encode()))
    path = f"/api/v1/{path}"
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": headers,
        "client": ("10.0.0.1", 1),
        "server": ("everstep.test", 80),
        "state": {},
    }

    async def run() -> None:
        await api.app(scope, listener.receive, listener.send)
        listener.is_over.set()

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(run())
        try:
            yield listener
        finally:
            listener.gone.set()
            listener.take.set()


def ids(*facts: Fact) -> list[str]:
    return [fact.id for fact in facts]


async def test_new_facts_are_heard_at_once_and_old_ones_are_not(api: Api) -> None:
    await api.add(make("job_started"))
    async with listening(api, await api.token()) as stream:
        greeting = await stream.block()
        assert greeting["id"] == f"{api.context.epoch}-1"
        new = [make("rank_exited") for _ in range(3)]
        await api.add(*new)
        assert await stream.facts(3) == ids(*new)
    assert stream.status == 200


async def test_the_whole_log_can_be_heard(api: Api) -> None:
    old = [make("rank_exited") for _ in range(1203)]
    await api.add(*old)
    async with listening(api, await api.token(), "after=0") as stream:
        assert await stream.facts(len(old)) == ids(*old)


async def test_a_stream_goes_on_where_the_client_was(api: Api) -> None:
    first, missed = make("job_started"), [make("rank_exited"), make("round_ended")]
    await api.add(first)
    async with listening(api, await api.token(), "after=0") as stream:
        event: dict[str, str] = {}
        while event.get("event") != "fact":
            event = await stream.block()
    await api.add(*missed)
    async with listening(api, await api.token(), last=event["id"]) as stream:
        assert "event" not in await stream.block()
        assert await stream.facts(2) == ids(*missed)


@pytest.mark.parametrize("place", ["0123456789ab-1", "{epoch}-99"])
async def test_a_client_of_another_database_is_told_so_and_hears_what_is_new(
    api: Api, place: str
) -> None:
    await api.add(make("job_started"))
    last = place.format(epoch=api.context.epoch)
    async with listening(api, await api.token(), last=last) as stream:
        reset = await stream.block()
        assert (reset["event"], reset["id"]) == ("reset", f"{api.context.epoch}-1")
        assert json.loads(reset["data"])["n"] == 1
        new = make("round_ended")
        await api.add(new)
        assert await stream.facts(1) == ids(new)


async def test_only_what_was_asked_for_is_heard(api: Api) -> None:
    query = "job=mine&kind=rank_exited&kind=node_lost"
    async with listening(api, await api.token(), query) as stream:
        await stream.block()
        wanted = [make("rank_exited", job="mine"), make("node_lost", job="mine")]
        others = [make("rank_exited", job="other"), make("round_ended", job="mine")]
        await api.add(others[0], wanted[0], others[1], wanted[1])
        assert await stream.facts(2) == ids(*wanted)


async def test_a_silent_stream_says_that_it_is_alive_and_how_far_it_is(api: Api) -> None:
    await api.open(keep_alive_s=0.05)
    async with listening(api, await api.token(), "job=mine") as stream:
        await stream.block()
        await api.add(make("job_started", job="other"))
        alive = await stream.block()
        while not alive["id"].endswith("-1"):
            alive = await stream.block()
        assert "event" not in alive


async def test_a_stream_ends_with_its_token(api: Api) -> None:
    await api.open(keep_alive_s=0.05)
    token = await api.token()
    async with listening(api, token) as stream:
        await stream.block()
        await api.context.tokens.revoke(token.split("_")[1], now_us=1)
        async with asyncio.timeout(WITHIN_S):
            await stream.is_over.wait()
    assert api.context.feed.listeners == {}


async def test_a_stream_ends_with_the_service(api: Api) -> None:
    async with listening(api, await api.token()) as stream:
        await stream.block()
        api.notifier.close()
        async with asyncio.timeout(WITHIN_S):
            await stream.is_over.wait()


async def test_a_client_that_takes_nothing_is_cut(api: Api) -> None:
    await api.open(slow_client_s=0.1)
    async with listening(api, await api.token()) as stream:
        await stream.block()
        stream.take.clear()
        await api.add(*(make("rank_exited") for _ in range(1500)))
        async with asyncio.timeout(WITHIN_S):
            await stream.is_over.wait()
    assert stream.sent.empty()
    assert api.context.feed.listeners == {}


async def test_listeners_are_limited_by_token_and_in_all(api: Api) -> None:
    await api.open(max_listeners=3, max_listeners_per_token=2)
    one, two = await api.token(), await api.token()
    async with (
        listening(api, one) as first,
        listening(api, one) as second,
        listening(api, two) as third,
    ):
        for stream in (first, second, third):
            await stream.block()
        async with api.client(one) as client:
            assert (await client.get("facts/stream")).status_code == 429
        async with api.client(two) as client:
            assert (await client.get("facts/stream")).status_code == 503
            status = (await client.get("status")).json()
    assert status["listeners"] == 3
    async with listening(api, one) as again:
        await again.block()


async def test_an_id_that_is_none_of_ours_is_refused(api: Api) -> None:
    async with api.client(await api.token()) as client:
        answer = await client.get("facts/stream", headers={"Last-Event-ID": "first"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_event_id")


async def test_hundreds_of_listeners_come_and_go_and_leave_nothing(api: Api) -> None:
    """150 listeners, and none is left (A11.6)."""
    token = await api.token()
    await api.open(max_listeners_per_token=200)
    facts = [make("rank_exited") for _ in range(40)]

    async def come_and_go(number: int) -> None:
        async with listening(api, token, "after=0") as stream:
            assert await stream.facts(number % 40) == ids(*facts[: number % 40])

    async with asyncio.timeout(50), asyncio.TaskGroup() as tasks:
        for number in range(150):
            tasks.create_task(come_and_go(number))
        for begin in range(0, 40, 10):
            await api.add(*facts[begin : begin + 10])
    assert (api.context.feed.listeners, api.notifier.waiting) == ({}, 0)


async def test_clients_that_come_together_share_a_query(api: Api) -> None:
    """Hundreds at once would wait for a connection to the database, and be refused (A11.6)."""
    await api.add(make("rank_exited"))
    with counted(api.database) as statements:
        heads = await asyncio.gather(*(api.context.feed.head() for _ in range(100)))
    assert {head.last_n for head in heads} == {1}
    assert len(statements) <= 2
    await api.add(make("rank_exited"))
    assert (await api.context.feed.head()).last_n == 2


async def test_a_fact_with_line_breaks_stays_one_event(api: Api) -> None:
    fact = make("job_started")
    async with listening(api, await api.token()) as stream:
        await stream.block()
        message = delivered(fact, 1)
        spread = message.data.replace(b',"', b',\r\n "').replace(b"{", b"{\n\n")
        batch = decode_batch([type(message)(1, message.subject, spread)]).facts
        appended = await api.fact_log.append("s", batch, sequence=1, received_us=1)
        api.notifier.announce(appended.last_n)
        assert await stream.facts(1) == ids(fact)
