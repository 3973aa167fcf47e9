"""Live streams of facts and of output: server-sent events that can be resumed, and are bounded."""

import asyncio
import logging
import re
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec
from fastapi.sse import format_sse_event
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from everstep.backoff import Backoff
from everstep.store.errors import StoreError
from everstep.store.queries import Record
from everstep.store.tokens import Token
from everstep_services.history.api.context import Context
from everstep_services.history.api.http.fact_json import check_bodies, fact_line
from everstep_services.history.api.http.problems import ProblemError
from everstep_services.history.bundle import damage_text

log = logging.getLogger(__name__)

_EVENT_ID = re.compile(r"([0-9a-f]{1,64})-([0-9]{1,18})")
_AFTER_ERROR_S = 1.0
Matches = Callable[[Record], bool]


@dataclass(frozen=True, slots=True)
class StreamStart:
    """Where a stream begins, and whether the client must start over."""

    n: int
    reset: str = ""
    """Why it cannot continue from where the client was."""


def start_of(
    last_event_id: str | None, after: int | None, *, epoch: str, last_n: int
) -> StreamStart:
    """Where a stream begins: after the last fact that the client has, else at the end."""
    if last_event_id is None:
        return StreamStart(last_n if after is None else min(after, last_n))
    match = _EVENT_ID.fullmatch(last_event_id)
    if match is None:
        raise ProblemError(
            400,
            "bad_event_id",
            "Last-Event-ID is not an id of this server: connect again without it",
        )
    if match[1] != epoch:
        return StreamStart(last_n, "the database was replaced: your facts are of the old one")
    if int(match[2]) > last_n:
        return StreamStart(last_n, "the database was set back: some of the facts you have are gone")
    return StreamStart(int(match[2]))


class EventStream(Response):
    """Sends events as they come, until the client, its token or the service goes away."""

    media_type = "text/event-stream"

    def __init__(self, context: Context, token: Token) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._context = context
        self._token = token

    def _chunks(self) -> AsyncIterator[bytes]:
        """What to send, as it comes. A `ProblemError` ends the stream with its words."""
        raise NotImplementedError

    async def _chunks_and_problem(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks():
                yield chunk
        except ProblemError as problem:
            data = msgspec.json.encode({"detail": problem.detail, "code": problem.code})
            yield b"event: problem\ndata: %b\n\n" % data

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the stream to its end."""
        del scope
        with listening(self._context, self._token):
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(_until_gone(receive), name="live client")
                    tasks.create_task(self._send_all(send), name="live send")
            except* (_Ended, OSError):
                pass

    async def _send_all(self, send: Send) -> None:
        limit_s = self._context.settings.slow_client_s
        begin = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(begin)
        async for chunk in self._chunks_and_problem():
            try:
                async with asyncio.timeout(limit_s):
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
            except TimeoutError:
                log.info("listener_cut token=%s slow_for_s=%.0f", self._token.id, limit_s)
                raise _Ended from None
        await send({"type": "http.response.body", "body": b""})
        raise _Ended

    async def _is_still_welcome(self) -> bool:
        try:
            return await self._context.auth.still_good(self._token)
        except StoreError:
            return True  # an absent database must not end a stream


class LiveStream(EventStream):
    """Sends facts as they come."""

    def __init__(
        self, context: Context, token: Token, start: StreamStart, matches: Matches
    ) -> None:
        super().__init__(context, token)
        self._start = start
        self._matches = matches

    async def _chunks(self) -> AsyncIterator[bytes]:
        context, n = self._context, self._start.n
        is_bus_connected = True
        yield self._greeting()
        checked = context.clock.now()
        while not context.feed.notifier.is_closed:
            rows = await self._read_after(n)
            if rows:
                n = rows[-1]["n"]
                for chunk in self._events(row for row in rows if self._matches(row)):
                    yield chunk
            keep_alive_s = context.settings.keep_alive_s
            if context.clock.now() - checked >= keep_alive_s:
                if not await self._is_still_welcome():
                    return
                checked = context.clock.now()
                yield f"id: {context.epoch}-{n}\n: alive\n\n".encode()
            if is_bus_connected != context.connectedness.is_bus_connected():
                is_bus_connected = not is_bus_connected
                yield _bus_event(is_connected=is_bus_connected)
            elif not rows:
                await context.feed.notifier.wait_beyond(n, keep_alive_s)

    async def _read_after(self, n: int) -> Sequence[Record]:
        """The next facts; none while the database cannot be read."""
        try:
            return await self._context.feed.after(n)
        except StoreError as error:
            log.debug("listener_waits error=%s", error)
            await self._context.clock.sleep(_AFTER_ERROR_S)
            return ()

    def _greeting(self) -> bytes:
        id_ = f"{self._context.epoch}-{self._start.n}"
        if not self._start.reset:
            return f"retry: 2000\nid: {id_}\n: welcome\n\n".encode()
        data = f'{{"reason":"{self._start.reset}","n":{self._start.n}}}'
        return format_sse_event(data_str=data, event="reset", id=id_, retry=2000)

    def _events(self, rows: Iterable[Record]) -> Iterator[bytes]:
        """The events of facts in one piece. Raises `ProblemError` after those before a damage."""
        events: list[bytes] = []
        damage: str | None = None
        for row in rows:
            try:
                events.append(self._event(row))
            except Exception as error:
                damage = damage_text(error) if self._context.bundle is not None else None
                if damage is None:
                    raise
                log.warning("bundle_damaged n=%d error=%s", row["n"], damage)
                break
        if events:
            yield b"".join(events)
        if damage is not None:
            raise ProblemError(500, "bundle_damaged", damage)

    def _event(self, row: Record) -> bytes:
        if self._context.bundle is not None:
            check_bodies([row])
        id_ = f"{self._context.epoch}-{row['n']}"
        return b"event: fact\nid: %b\ndata: %b\n\n" % (id_.encode(), fact_line(row))


def _bus_event(*, is_connected: bool) -> bytes:
    """It has no id, because it is not a place in the log."""
    flag = "true" if is_connected else "false"
    return format_sse_event(data_str=f'{{"is_connected":{flag}}}', event="bus")


@contextmanager
def listening(context: Context, token: Token) -> Generator[None]:
    """Count a listener for as long as it listens. Call `check_room` before."""
    listeners = context.feed.listeners
    listeners[token.id] = listeners.get(token.id, 0) + 1
    try:
        yield
    finally:
        listeners[token.id] -= 1
        if not listeners[token.id]:
            del listeners[token.id]


def check_room(context: Context, token: Token) -> None:
    """Refuse a listener beyond the limits."""
    settings, listeners = context.settings, context.feed.listeners
    own = listeners.get(token.id, 0)
    if own >= settings.max_listeners_per_token:
        raise ProblemError(
            429,
            "too_many_listeners",
            f"this token has {own} live streams, and that is the limit: close one",
            headers={"Retry-After": "5"},
        )
    if sum(listeners.values()) >= settings.max_listeners:
        detail = f"{settings.max_listeners} live streams are open: try again later"
        raise ProblemError(503, "too_many_listeners", detail, headers={"Retry-After": "30"})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    raise _Ended


class _Ended(Exception):  # noqa: N818  not an error: it ends the task group
    pass


_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 2.0
_AWAY_S = 2.0


@dataclass(frozen=True, slots=True)
class Lines:
    """A page of lines, and where the next page begins."""

    round: int
    next: str
    data: bytes
    """The page as JSON; empty when it has no lines."""
    is_end: bool


class LogStream(EventStream):
    """Sends a page of lines, and then each later page that has lines."""

    def __init__(
        self,
        context: Context,
        token: Token,
        first: Lines,
        after: Callable[[str], Awaitable[Lines]],
        next_round: Callable[[int], Awaitable[Lines | None]],
    ) -> None:
        super().__init__(context, token)
        self._first = first
        self._after = after
        self._next_round = next_round

    async def _chunks(self) -> AsyncIterator[bytes]:
        clock, keep_alive_s = self._context.clock, self._context.settings.keep_alive_s
        page, waits, checked = self._first, Backoff(_FIRST_WAIT_S, _LONGEST_WAIT_S), clock.now()
        yield b"retry: 2000\nid: %b\n: welcome\n\n" % page.next.encode()
        while not self._context.feed.notifier.is_closed:
            if page.data:
                yield b"event: lines\nid: %b\ndata: %b\n\n" % (page.next.encode(), page.data)
                waits.reset()
            if page.is_end:
                await clock.sleep(waits.failed())
            if clock.now() - checked >= keep_alive_s:
                if not await self._is_still_welcome():
                    return
                checked = clock.now()
                yield b"id: %b\n: alive\n\n" % page.next.encode()
            try:
                page = await self._following(page)
            except ProblemError as problem:
                if problem.status_code != 503:
                    raise
                page = Lines(page.round, page.next, b"", is_end=True)
                await clock.sleep(_AWAY_S)

    async def _following(self, page: Lines) -> Lines:
        """The next page; the first of the next round where this one has no more lines."""
        is_over = page.is_end and not page.data
        if is_over and (begun := await self._next_round(page.round)) is not None:
            return begun
        return await self._after(page.next)
