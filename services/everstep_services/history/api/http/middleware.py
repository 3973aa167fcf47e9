"""The middleware before all endpoints: limits, the token, and safe headers."""

import asyncio
import hashlib
import logging
import re
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep import spans
from everstep.store.errors import StoreError
from everstep_services.history.api.http.auth import TokenAuth
from everstep_services.history.api.http.problems import ProblemError, of_store
from everstep_services.history.bundle import damage_text
from everstep_services.history.settings import ApiSettings

log = logging.getLogger(__name__)

_LIVE = re.compile(r"/api/v1/(facts/stream|jobs/[^/]+/logs/stream)")
_READS = frozenset({"GET", "HEAD", "OPTIONS"})
_LOGIN = "/api/v1/login-codes"
"""The only change that a bundle takes: a way in for a browser."""
_BOUNDED = "/api/v1/facts"
"""Pages of facts end early by themselves; one fact is always shown."""
_DOWNLOAD = re.compile(r"/api/v1/(incidents/[^/]+/evidence/[^/]+|jobs/[^/]+/export)")
"""Downloads may be larger than a page and get no ETag: each is held in memory once."""
_DOWNLOADS_AT_ONCE = 4
_PORT = re.compile(r":[0-9]+$")
_SAFE = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
}

_READ_ONLY = (
    "this is an exported bundle, which nobody can change: "
    "send the request to the service of the cluster that the job ran on"
)


class RequestLimits:
    """The outermost layer: no endpoint runs for a request that breaks a limit."""

    def __init__(
        self, app: ASGIApp, settings: ApiSettings, auth: TokenAuth, *, is_read_only: bool = False
    ) -> None:
        self._app = app
        self._settings = settings
        self._auth = auth
        self._is_read_only = is_read_only
        self._running = 0
        self._downloads = asyncio.Semaphore(_DOWNLOADS_AT_ONCE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        most = self._settings.max_response_bytes
        answer = _Answer(send, scope["path"], most, is_head=scope["method"] == "HEAD")
        about = {"http.request.method": scope["method"], "url.path": scope["path"]}
        parent = Headers(scope=scope).get(spans.HEADER)
        try:
            with spans.span(f"{scope['method']} /api/v1", "server", about, parent=parent):
                await self._answer(scope, receive, answer)
        except ProblemError as problem:
            await problem.send(scope, receive, answer)
        except StoreError as error:
            await of_store(error).send(scope, receive, answer)
        except Exception as error:
            damage = damage_text(error) if self._is_read_only else None
            if damage:
                log.warning("bundle_damaged path=%s error=%s", scope["path"], damage)
            else:
                log.exception("request_failed method=%s path=%s", scope["method"], scope["path"])
            if not answer.is_whole:
                raise  # half an answer must not look complete

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        headers = Headers(scope=scope)
        self._check_size(scope, headers)
        self._check_host(headers)
        client = scope.get("client")
        address = client[0] if client else "local"
        token = await self._auth.admit(headers.get("authorization"), address)
        scope.setdefault("state", {})["token"] = token
        if self._is_read_only and scope["method"] not in _READS and scope["path"] != _LOGIN:
            raise ProblemError(403, "read_only", _READ_ONLY)
        if _LIVE.fullmatch(scope["path"]):
            await self._app(scope, receive, answer)  # live streams have limits of their own
            return
        answer.asked = headers.get("if-none-match")
        is_download = _DOWNLOAD.fullmatch(scope["path"]) is not None
        answer.is_tagged = scope["method"] in {"GET", "HEAD"} and not is_download
        if scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        receive = _limited(receive, self._settings)
        if not is_download:
            await self._answer_in_turn(scope, receive, answer)
            return
        async with self._downloads:
            await self._answer_in_turn(scope, receive, answer)

    async def _answer_in_turn(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        if self._running >= self._settings.max_concurrent:
            detail = f"{self._running} requests are in progress: try again in a moment"
            raise ProblemError(503, "too_busy", detail, headers={"Retry-After": "1"})
        self._running += 1
        try:
            async with asyncio.timeout(self._settings.answer_within_s):
                await self._app(scope, receive, answer)
        except TimeoutError:
            if answer.has_begun:
                raise  # a part of a file is cut off, so that the client notices
            limit_s = self._settings.answer_within_s
            raise ProblemError(503, "too_slow", f"no answer within {limit_s:g} s") from None
        finally:
            self._running -= 1

    def _check_size(self, scope: Scope, headers: Headers) -> None:
        limits = self._settings
        url = len(scope.get("raw_path") or b"") + len(scope["query_string"])
        if url > limits.max_url_bytes:
            detail = f"the URL has {url} bytes, {limits.max_url_bytes} is the limit"
            raise ProblemError(414, "url_too_long", detail)
        size = sum(len(name) + len(value) for name, value in headers.raw)
        if size > limits.max_header_bytes:
            detail = f"the headers have {size} bytes, {limits.max_header_bytes} is the limit"
            raise ProblemError(431, "headers_too_large", detail)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > limits.max_body_bytes:
            raise _body_too_large(limits)

    def _check_host(self, headers: Headers) -> None:
        allowed = self._settings.allowed_hosts
        host = _PORT.sub("", headers.get("host", "")).strip("[]").lower()
        if allowed and host not in allowed:
            raise ProblemError(400, "wrong_host", "this name is not served here")


class _Answer:
    """Sends an answer with safe headers, and as 304 when the client has it already."""

    def __init__(self, send: Send, path: str, most_bytes: int, *, is_head: bool) -> None:
        self._send = send
        self._path = path
        self._most_bytes = most_bytes
        self._is_head = is_head
        self._start: Message | None = None
        self._parts: list[bytes] = []
        self.is_whole = False
        self.has_begun = False
        self.is_tagged = False
        self.asked: str | None = None

    async def __call__(self, message: Message) -> None:
        """Take one part of the answer."""
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _SAFE.items():
                headers.setdefault(name, value)
            headers.setdefault("Cache-Control", "private, no-cache")
            if self.is_tagged and message["status"] == 200:
                self._start = message
                return
            await self._pass(message)
        elif self._start is None:
            body = b"" if self._is_head else message.get("body", b"")
            await self._pass({**message, "body": body})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._finish(self._start, b"".join(self._parts))

    async def _finish(self, start: Message, body: bytes) -> None:
        if len(body) <= self._most_bytes or self._path.startswith(_BOUNDED):
            await self._tagged(start, body)
            return
        self._start = None
        detail = "the answer would be too large: ask for fewer items with `limit`"
        problem = ProblemError(400, "answer_too_large", detail).response(self._path)
        await problem({"type": "http"}, _nothing_more, self)

    async def _tagged(self, start: Message, body: bytes) -> None:
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        MutableHeaders(scope=start)["ETag"] = tag
        if self.asked is not None and _matches(self.asked, tag):
            start["status"] = 304
            kept = [(n, v) for n, v in start["headers"] if n.lower() not in _OF_THE_BODY]
            start["headers"], body = kept, b""
        await self._pass(start)
        shown = b"" if self._is_head else body
        await self._pass({"type": "http.response.body", "body": shown})

    async def _pass(self, message: Message) -> None:
        self.has_begun = True
        await self._send(message)
        is_body = message["type"] == "http.response.body"
        self.is_whole = is_body and not message.get("more_body", False)


_OF_THE_BODY: Sequence[bytes] = (b"content-length", b"content-type")


async def _nothing_more() -> Message:
    return {"type": "http.disconnect"}


def _matches(asked: str, tag: str) -> bool:
    tags = [item.strip().removeprefix("W/") for item in asked.split(",")]
    return "*" in tags or tag in tags


def _limited(receive: Receive, limits: ApiSettings) -> Receive:
    left = limits.max_body_bytes

    async def limited() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise _body_too_large(limits)
        return message

    return limited


def _body_too_large(limits: ApiSettings) -> ProblemError:
    return ProblemError(
        413, "body_too_large", f"the body may have at most {limits.max_body_bytes} bytes"
    )
