"""One request to one address: bounded in time and size, never redirected, cut off when late."""

import asyncio
import base64
import email.utils
import http.client
import socket
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from everstep.errors import EverstepError
from everstep.observe.printable import printable
from everstep.observe.redaction import redact

_BODY_MOST: Final = 64 * 1024
_SHOWN_MOST: Final = 200


class NotSentError(EverstepError):
    """Nobody can say whether the request has arrived. The text names no address."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """What is sent."""

    url: str
    body: bytes = b""
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What came back."""

    status: int
    text: str
    """The beginning of the body, fit for people."""
    retry_after: str = ""

    @property
    def is_taken(self) -> bool:
        """The target has it."""
        return 200 <= self.status < 300

    @property
    def is_final(self) -> bool:
        """Another attempt would get the same answer. A redirect is never followed."""
        return 300 <= self.status < 500 and self.status not in {408, 429}

    def wait_s(self, now: datetime) -> float | None:
        """How long the target asks to wait, in seconds or until a date."""
        value = self.retry_after.strip()
        if value.isascii() and value.isdecimal() and len(value) < 10:
            return float(value)
        try:
            return max(0.0, (email.utils.parsedate_to_datetime(value) - now).total_seconds())
        except (ValueError, TypeError):
            return None


async def send(request: HttpRequest, within_s: float) -> HttpAnswer:
    """The answer; `NotSentError` when there is none in time."""
    exchange = _Exchange(request, within_s)
    try:
        async with asyncio.timeout(within_s):
            return await asyncio.to_thread(exchange.run)
    except TimeoutError:
        if exchange.begun is not None:  # the target has decided; only its text is late
            return exchange.begun
        raise NotSentError(f"no answer within {within_s:g} s") from None
    finally:
        exchange.abort()


class _Exchange:
    """Runs in a thread; the loop may cut it off."""

    def __init__(self, request: HttpRequest, within_s: float) -> None:
        self._request = request
        self._within_s = within_s
        self._connection: http.client.HTTPConnection | None = None
        self._is_aborted = False
        self.begun: HttpAnswer | None = None
        """The answer without its text, once its status is here."""

    def abort(self) -> None:
        """Wake the thread, whatever it waits for."""
        self._is_aborted = True
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def run(self) -> HttpAnswer:
        try:
            return self._exchanged()
        except (OSError, http.client.HTTPException, ValueError) as error:
            if self.begun is not None:
                return self.begun
            # Their texts may hold the address, which may be a secret.
            raise NotSentError(_described(error)) from None

    def _exchanged(self) -> HttpAnswer:
        request = self._request
        parts = urlsplit(request.url)
        self._connection, target, more = _opened(parts, self._within_s)
        headers = {"User-Agent": "everstep", "Connection": "close", **more, **request.headers}
        try:
            self._connection.connect()
            if self._is_aborted:
                raise NotSentError("it was cut off")
            self._connection.request(request.method, target, request.body or None, headers)
            with self._connection.getresponse() as response:
                retry_after = response.headers.get("Retry-After", "")[:64]
                self.begun = HttpAnswer(response.status, "", retry_after)
                data = response.read(_BODY_MOST)
                text = printable(redact(" ".join(data.decode("utf-8", "replace").split())))
                return replace(self.begun, text=text[:_SHOWN_MOST])
        finally:
            self._connection.close()


def _opened(
    parts: SplitResult, within_s: float
) -> tuple[http.client.HTTPConnection, str, Mapping[str, str]]:
    """A connection, what to ask it for, and with which headers; by a proxy where one is set."""
    host, port = parts.hostname or "", parts.port
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    is_tls = parts.scheme == "https"
    kind = http.client.HTTPSConnection if is_tls else http.client.HTTPConnection
    proxies = urllib.request.getproxies()
    proxy = "" if urllib.request.proxy_bypass(host) else proxies.get(parts.scheme, "")
    if not proxy:
        return kind(host, port, timeout=within_s), path, {}
    by = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    login = _login(by)
    connection = kind(by.hostname or "", by.port or 3128, timeout=within_s)
    if is_tls:
        connection.set_tunnel(host, port, headers=login)
        return connection, path, {}
    return connection, f"http://{parts.netloc}{path}", {"Host": parts.netloc, **login}


def _login(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    name, password = unquote(proxy.username), unquote(proxy.password or "")
    proof = base64.b64encode(f"{name}:{password}".encode()).decode()
    return {"Proxy-Authorization": f"Basic {proof}"}


def _described(error: Exception) -> str:
    why = getattr(error, "strerror", None)
    name = type(error).__name__
    return f"{name}: {printable(redact(str(why)))[:_SHOWN_MOST]}" if why else name
