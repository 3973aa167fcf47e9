"""Starts the server: on stdin and stdout, or on a port, with checks of who may speak to it."""

import asyncio
import logging
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import sha256

import msgspec
from mcp.server.transport_security import TransportSecuritySettings
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from everstep import runtime
from everstep.clock import Clock, SystemClock
from everstep.observe.connections import ConnectionLimits
from everstep.observe.http import listen, serve_asgi, url_of
from everstep_services.cli.api.client import ApiRefusalError
from everstep_services.cli.api.location import find_api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.mcp_server.server import caller_token, make_server
from everstep_services.cli.mcp_server.source import Source, open_with
from everstep_services.cli.output import say

log = logging.getLogger(__name__)

PATH = "/mcp"
_CACHE_S = 10.0
_CACHE_MOST = 1000
_BAD_PER_MINUTE = 20
_GUESSES_AT_ONCE = 4
_ADDRESSES_MOST = 10_000
_HEADER_MOST = 16 << 10
BODY_MOST = 256 << 10

Refusal = tuple[int, str, int]
"""The status, the text, and the seconds after which a client may try again."""
_SOON_S = 5
Admit = Callable[[str], Awaitable[None]]
"""Raises a `CliError` where the token is not admitted."""


class HttpAccess:
    """The outermost layer: nothing inside runs for a request that may not be made."""

    def __init__(
        self,
        app: ASGIApp,
        admit: Admit,
        clock: Clock,
        hosts: frozenset[str],
        origins: frozenset[str],
    ) -> None:
        self._app = app
        self._admit = admit
        self._clock = clock
        self._hosts = hosts
        self._origins = origins
        self._good: OrderedDict[bytes, float] = OrderedDict()
        self._bad: OrderedDict[str, tuple[float, int]] = OrderedDict()
        self._guesses = asyncio.Semaphore(_GUESSES_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        refusal = await self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await _refuse(send, *refusal)

    async def _refusal(self, scope: Scope) -> Refusal | None:
        headers = Headers(scope=scope)
        unfit = self._unfit(headers, scope)
        if unfit is not None:
            return *unfit, _SOON_S
        return await self._bad_token(headers.get("authorization", ""), scope)

    def _unfit(self, headers: Headers, scope: Scope) -> tuple[int, str] | None:
        if sum(len(name) + len(value) for name, value in headers.raw) > _HEADER_MOST:
            return 431, f"the headers have more than {_HEADER_MOST} bytes"
        if headers.get("host", "").lower() not in self._hosts:
            return 421, "this name is not served here: add it with --allowed-host"
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in self._origins:
            return 403, "pages of this origin may not ask: add it with --allowed-origin"
        if scope["path"] != PATH:
            return 404, f"only {PATH} is served here"
        length = headers.get("content-length", "" if scope["method"] == "POST" else "0")
        is_open_ended = "transfer-encoding" in headers  # its length shows only at its end
        if is_open_ended or not length.isdecimal() or int(length) > BODY_MOST:
            return 413, f"the body has more than {BODY_MOST} bytes, or no length"
        return None

    async def _bad_token(self, authorization: str, scope: Scope) -> Refusal | None:
        scheme, _, token = authorization.partition(" ")
        token = token.strip()
        if scheme.lower() != "bearer" or not token:
            return 401, "send an Everstep token: `Authorization: Bearer evs_…`", _SOON_S
        key, now = sha256(token.encode(errors="replace")).digest(), self._clock.now()
        if now - self._good.get(key, float("-inf")) < _CACHE_S:
            return None
        address = scope["client"][0] if scope.get("client") else "local"
        try:
            await self._admit_in_turn(token, is_guesser=self._wait_s(address, now) > 0)
        except CliError as error:
            return self._not_admitted(error, address, now)
        self._good[key] = now
        self._good.move_to_end(key)
        while len(self._good) > _CACHE_MOST:
            self._good.popitem(last=False)
        return None

    async def _admit_in_turn(self, token: str, *, is_guesser: bool) -> None:
        """A right token passes from any address; the API is asked a few at a time by guessers."""
        async with self._guesses if is_guesser else nullcontext():
            await self._admit(token)

    def _wait_s(self, address: str, now: float) -> int:
        """Seconds for which wrong tokens of this address are refused; 0 where they are few."""
        began, times = self._bad.get(address, (now, 0))
        return int(began + 60 - now) + 1 if now - began < 60 and times >= _BAD_PER_MINUTE else 0

    def _not_admitted(self, error: CliError, address: str, now: float) -> Refusal:
        status = error.status if isinstance(error, ApiRefusalError) else None
        if status == 403:  # a good token of another scope
            return 403, str(error), _SOON_S
        if status == 429:  # to the API, all of our clients are one address
            wait_s = (isinstance(error, ApiRefusalError) and error.retry_after_s) or 60
            text = f"the API does not admit this token, after many bad ones: wait {wait_s} s"
            return 429, text, wait_s
        if status != 401 and error.code is not Exit.FORBIDDEN:
            return 503, str(error), _SOON_S
        if wait_s := self._wait_s(address, now):
            times = self._bad[address][1]
            return 429, f"{times} bad tokens came from this address: wait {wait_s} s", wait_s
        began, times = self._bad.pop(address, (now, 0))
        self._bad[address] = (began, times + 1) if now - began < 60 else (now, 1)
        while len(self._bad) > _ADDRESSES_MOST:
            self._bad.popitem(last=False)
        if times + 1 == _BAD_PER_MINUTE:
            log.warning("mcp_logins_refused address=%s failed=%d", address, times + 1)
        return 401, "this token is not known, has expired or was revoked", _SOON_S


async def _refuse(send: Send, status: int, text: str, wait_s: int) -> None:
    body = msgspec.json.encode({"error": text})
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b'Bearer realm="everstep"'))
    if status in {429, 503}:
        headers.append((b"retry-after", str(wait_s).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
_CONNECTIONS = 64
_LIBRARY_LOG = "mcp.server.streamable_http"


@dataclass(frozen=True, slots=True)
class HttpOptions:
    """Where to listen, and for whom."""

    host: str = "127.0.0.1"
    port: int = 7077
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()


def serve_stdio(invocation: Invocation, *, allows_changes: bool) -> int:
    """Serve one client, until it closes stdin. Returns the exit code."""
    if allows_changes:
        _check_own_token(invocation)
    make_server(Source(invocation), allows_changes=allows_changes).run("stdio")
    return Exit.OK


def serve_http(invocation: Invocation, options: HttpOptions, *, allows_changes: bool) -> int:
    """Serve until a signal. Returns the exit code."""
    is_loopback = options.host in {"127.0.0.1", "::1", "localhost"}
    if not is_loopback and not options.allowed_hosts:
        raise CliError(
            f"{options.host} is not loopback: name the hosts that clients use with "
            f"--allowed-host NAME[:PORT], and put a proxy with TLS before the server",
            Exit.USAGE,
        )
    _check_names(options)
    find_api(invocation, waits=False)  # a wrong address is refused now, not at the first request
    listener = listen(options.host, options.port, remedy="choose another port with --port")
    port = listener.getsockname()[1]
    hosts = frozenset(name.lower() for name in (*_with_port(port), *options.allowed_hosts))
    own_origins = [f"http://{name}:{port}" for name in _LOOPBACK]
    origins = frozenset(name.lower() for name in (*own_origins, *options.allowed_origins))
    server = make_server(Source(invocation, caller_token.get), allows_changes=allows_changes)
    app = server.streamable_http_app(
        streamable_http_path=PATH,
        stateless_http=True,
        json_response=True,
        max_request_body_size=BODY_MOST,
        transport_security=TransportSecuritySettings(
            allowed_hosts=sorted(hosts), allowed_origins=sorted(origins)
        ),
    )

    logging.getLogger(_LIBRARY_LOG).addFilter(is_about_the_server)

    async def admit(token: str) -> None:
        await asyncio.to_thread(_check_token, invocation, token)

    access = HttpAccess(app, admit, SystemClock(), hosts, origins)

    async def main(stop: asyncio.Event) -> None:
        say(f"MCP for clients with a token of Everstep: {url_of(listener)}{PATH}")
        async with server.session_manager.run():
            await serve_asgi(access, listener, stop, limits=ConnectionLimits(most=_CONNECTIONS))

    return runtime.run("mcp", main)


def is_about_the_server(record: logging.LogRecord) -> bool:
    """Whether a line of the library is about more than a client that has gone: then it stays."""
    kind = record.exc_info[0] if record.exc_info else None
    return kind is None or not issubclass(kind, ClientDisconnect)


def _check_names(options: HttpOptions) -> None:
    for host in options.allowed_hosts:
        if not re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?", host):
            text = f"--allowed-host {host!r}: write NAME or NAME:PORT, as clients send it in Host"
            raise CliError(text, Exit.USAGE)
    for origin in options.allowed_origins:
        if not re.fullmatch(r"https?://[^/\s]+", origin):
            text = f"--allowed-origin {origin!r}: write http://HOST[:PORT] or https://HOST[:PORT]"
            raise CliError(text, Exit.USAGE)


def _with_port(port: int) -> list[str]:
    return [f"{name}:{port}" for name in _LOOPBACK]


def _check_token(invocation: Invocation, token: str) -> None:
    with open_with(invocation, token) as api:
        api.probe()


def _check_own_token(invocation: Invocation) -> None:
    """Changes are recorded under a token's name: the one of `everstep up` names nobody."""
    place = find_api(invocation, waits=False)
    if place is None or place.token_file is None or not place.is_token_named:
        raise CliError(
            "--allow-changes needs an API and a token of its own: `everstep token create mcp "
            "--scope operate > FILE` makes one, and --token-file FILE names it",
            Exit.USAGE,
        )
