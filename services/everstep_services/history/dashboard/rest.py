"""What pages know: REST's own answers, asked inside the process with the visitor's token.

This is the only module of the dashboard that knows how REST is reached. Every page therefore has
REST's limits, scopes and records, and no way around them.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from urllib.parse import quote, unquote, urlencode

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.clock import Clock
from everstep.errors import EverstepError

_BASE = "/api/v1/"
_AT_ONCE = 24
"""Fewer than REST has turns: pages never leave its clients without one."""
_OF_A_PAGE = 4
"""As many as the database has readers: on a slow machine, more would fail while they wait."""
_KEPT_ANSWERS = 400
_KEPT_BYTES = 32 << 20
_KEPT_LARGEST = 1 << 20
_KEPT_FOR_S = 900.0
_LIVE_WITHIN_S = 2.0
"""A page waits no longer for what the bus or a service would tell it at this moment."""
_AWAY = frozenset({502, 503, 504})
_SILENCE = {
    "bus_unavailable": "The bus does not answer",
    "late": "The bus or a service does not answer in time",
}
_AWAY_TEXTS = {**_SILENCE, "database_unavailable": "The database cannot be used now"}

_LATE = b'{"detail":"the bus or a service does not answer in time","code":"late"}'

Query = Mapping[str, object]


class RestError(EverstepError):
    """REST has refused, or cannot answer now."""

    def __init__(self, status: int, detail: str, code: str = "") -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.code = code


@dataclass(frozen=True, slots=True)
class RestAnswer:
    """The data, or the reason why there are none."""

    data: Any
    problem: str = ""
    status: int = 200

    @property
    def items(self) -> Sequence[Mapping[str, Any]]:
        """What a list has; nothing where it was not answered."""
        items: Sequence[Mapping[str, Any]] = () if self.data is None else self.data["items"]
        return items


@dataclass(frozen=True, slots=True)
class Visitor:
    """Who looks at a page, and from where."""

    token: str
    client: tuple[str, int]
    host: str


class Rest:
    """Asks the REST application, and remembers what it answered last."""

    def __init__(self, app: ASGIApp, clock: Clock) -> None:
        self.app = app
        self._clock = clock
        self._kept: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._kept_bytes = 0
        self._turns = asyncio.Semaphore(_AT_ONCE)

    def now(self) -> datetime:
        """The time of day, for what pages compute from it."""
        return self._clock.wall()

    def reader(self, visitor: Visitor) -> "Reader":
        """For one request of one visitor."""
        return Reader(self, visitor)

    async def ask(
        self, visitor: Visitor, method: str, path: str, query: str, body: bytes = b""
    ) -> tuple[int, bytes, Scope]:
        """Status and body of one answer, and the scope with what REST noted in it."""
        scope = _scope(visitor, method, path, query, body)
        parts: list[bytes] = []
        status = 500

        async def receive() -> Message:
            nonlocal body
            sent, body = body, b""
            return {"type": "http.request", "body": sent, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                parts.append(message.get("body", b""))

        async with self._turns:
            await self.app(scope, receive, send)
        return status, b"".join(parts), scope

    async def pass_on(
        self, visitor: Visitor, path: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Let REST answer the visitor's own connection: for streams and downloads."""
        query = scope["query_string"].decode("latin-1")
        inner = _scope(visitor, "GET", path, query, b"")
        passed = (b"last-event-id", b"accept", b"accept-encoding")
        inner["headers"] += [(name, value) for name, value in scope["headers"] if name in passed]
        await self.app(inner, receive, send)

    def keep(self, key: bytes, data: bytes) -> None:
        """Remember an answer for the time when the database or a service is away."""
        if len(data) > _KEPT_LARGEST:
            return
        old = self._kept.pop(key, None)
        self._kept_bytes += len(data) - (len(old[1]) if old else 0)
        self._kept[key] = (self._clock.now(), data)
        while len(self._kept) > _KEPT_ANSWERS or self._kept_bytes > _KEPT_BYTES:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._kept_bytes -= len(dropped)

    def kept(self, key: bytes) -> tuple[float, bytes] | None:
        """The last good answer and its age in seconds."""
        kept = self._kept.get(key)
        if kept is None:
            return None
        age_s = self._clock.now() - kept[0]
        return (age_s, kept[1]) if age_s <= _KEPT_FOR_S else None


@dataclass(slots=True)
class Reader:
    """What one request reads and does."""

    rest: Rest
    visitor: Visitor
    scope: str = ""
    """The scope of the token, once REST has admitted it."""
    stale_s: float | None = None
    """The age of the oldest answer that was given from memory."""
    stale_reason: str = ""
    silence: str = ""
    """Set when a question to the bus or to a service had no answer."""
    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_OF_A_PAGE))

    async def get(self, path: str, **query: object) -> Any:
        """The JSON that REST answers. A `RestError` says why there is none."""
        return await self._read(path, _query(query), None)

    async def get_or_not(self, path: str, **query: object) -> RestAnswer:
        """As `get`; a refusal is an answer, too, except that nobody is logged in."""
        return await self._read_or_not(path, _query(query), None)

    async def get_live(self, path: str, **query: object) -> RestAnswer:
        """As `get_or_not`, for what only the bus or a service knows: without a long wait."""
        return await self._read_or_not(path, _query(query), _LIVE_WITHIN_S)

    async def _read(self, path: str, query: str, within_s: float | None) -> Any:
        status, data = await self._ask("GET", path, query, within_s=within_s)
        key = self._key(path, query)
        if status == 200:
            self.rest.keep(key, data)
            return msgspec.json.decode(data)
        error = _error(status, data)
        self.silence = _SILENCE.get(error.code, self.silence)
        kept = self.rest.kept(key) if status in _AWAY else None
        if kept is None:
            raise error
        self.stale_s = max(self.stale_s or 0.0, kept[0])
        self.stale_reason = _away_text(error)
        return msgspec.json.decode(kept[1])

    async def _read_or_not(self, path: str, query: str, within_s: float | None) -> RestAnswer:
        try:
            return RestAnswer(await self._read(path, query, within_s))
        except RestError as error:
            if error.status == 401:
                raise
            return RestAnswer(None, error.detail, error.status)

    async def text(self, path: str, **query: object) -> RestAnswer:
        """Return a resource that is not JSON, as text."""
        status, data = await self._ask("GET", path, _query(query))
        if status == 200:
            return RestAnswer(data.decode(errors="replace"))
        return RestAnswer(None, _error(status, data).detail, status)

    async def send(self, method: str, path: str, body: object, **query: object) -> Any:
        """Have something done, by the path that every client of REST takes."""
        data = b"" if body is None else msgspec.json.encode(body)
        status, answer = await self._ask(method, path, _query(query), data)
        if not 200 <= status < 300:
            raise _error(status, answer)
        return msgspec.json.decode(answer) if answer else None

    async def _ask(
        self, method: str, path: str, query: str, body: bytes = b"", within_s: float | None = None
    ) -> tuple[int, bytes]:
        async with self.turns:
            try:
                async with asyncio.timeout(within_s):
                    asked = self.rest.ask(self.visitor, method, path, query, body)
                    status, data, scope = await asked
            except TimeoutError:
                return 503, _LATE
        token = scope.get("state", {}).get("token")
        self.scope = getattr(token, "scope", self.scope)
        return status, data

    def _key(self, path: str, query: str) -> bytes:
        about = "\0".join((self.visitor.token, path, query))
        return hashlib.blake2b(about.encode(), digest_size=16).digest()


async def together(*reads: Awaitable[Any]) -> Sequence[Any]:
    """The results of all, read at the same time; the first failure ends the others."""
    tasks: list[asyncio.Task[Any]] = []

    async def result(read: Awaitable[Any]) -> Any:
        return await read

    try:
        async with asyncio.TaskGroup() as group:
            tasks.extend(group.create_task(result(read)) for read in reads)
    except* RestError as errors:
        raise _first(errors) from None
    return [task.result() for task in tasks]


def path_of(*parts: object) -> str:
    """A path of names that may hold any character."""
    return "/".join(quote(str(part), safe=":") for part in parts)


def _first(errors: BaseExceptionGroup[Any]) -> RestError:
    error = errors.exceptions[0]
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, RestError)
    return error


def _away_text(error: RestError) -> str:
    service, is_away, _ = error.code.partition("_unavailable")
    by_service = f"The service {service} does not answer" if is_away else error.detail
    return _AWAY_TEXTS.get(error.code, by_service)


def _query(query: Query) -> str:
    given = {name: _value(value) for name, value in query.items() if value not in {None, ""}}
    return urlencode(given, doseq=True)


def _value(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value


def _scope(visitor: Visitor, method: str, path: str, query: str, body: bytes) -> Scope:
    raw = _BASE + path
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": unquote(raw),
        "raw_path": raw.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [
            (b"host", visitor.host.encode("latin-1", "replace")),
            (b"authorization", f"Bearer {visitor.token}".encode("latin-1", "replace")),
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": visitor.client,
        "server": None,
        "state": {},
    }


def _error(status: int, data: bytes) -> RestError:
    try:
        problem = msgspec.json.decode(data)
        detail, code = str(problem["detail"]), str(problem.get("code", ""))
        errors = problem.get("errors") or ()
        fields = [f"{field['where']}: {field['problem']}" for field in errors]
        is_path = bool(errors) and all(field["where"].startswith("path.") for field in errors)
    except (msgspec.DecodeError, KeyError, TypeError):
        return RestError(status, f"the service answered with status {status}")
    if is_path:  # of no name that anything can have
        return RestError(404, "nothing can have the name in this address", code)
    return RestError(status, "; ".join(fields) or detail, code)
