"""Starts the server: on stdin and stdout, or on a port."""

import asyncio
import logging
import re
from dataclasses import dataclass

from mcp.server.transport_security import TransportSecuritySettings
from starlette.requests import ClientDisconnect

from everstep import runtime
from everstep.clock import SystemClock
from everstep.observe.connections import ConnectionLimits
from everstep.observe.http import listen, serve_asgi, url_of
from everstep_services.cli.api.location import find_api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.mcp_server.http_access import BODY_MOST, PATH, HttpAccess
from everstep_services.cli.mcp_server.server import caller_token, make_server
from everstep_services.cli.mcp_server.source import Source, open_with
from everstep_services.cli.output import say

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
