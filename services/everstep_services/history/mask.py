"""The gate for all that leaves history: what looks like a secret is masked there, and only there.

REST's answers pass `MaskedAnswers`; pages, commands and live streams are made of these. Bundles and
downloads are masked piece by piece. What a secret looks like is decided by
`everstep.observe.redaction`.
"""

import asyncio

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from everstep.evidence.archive import ArchiveMember, BadArchiveError, is_archive, pack, unpack
from everstep.observe.redaction import redact, redact_json

_STREAM = "text/event-stream"
_LARGE = 256 << 10
"""Longer answers are masked in a thread, so that others are answered meanwhile."""


def mask_fact(body: str) -> str:
    """The JSON of a fact without secrets."""
    return redact_json(body)


def mask_file(data: bytes) -> bytes:
    """A piece of evidence without secrets in its texts; what is not text stays as it is."""
    if is_archive(data):
        return _mask_archive(data)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return data
    if "\0" in text:
        return data
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return redact(text).encode()
    return redact_json(text).encode()


def _mask_archive(data: bytes) -> bytes:
    try:
        archive = unpack(data)
    except BadArchiveError:
        return data
    members = [
        ArchiveMember(file.rank, file.suffix, mask_file(file.content)) for file in archive.members
    ]
    if members == list(archive.members) and not any(map(_is_secret, archive.missing.values())):
        return data
    return pack(members, {rank: redact(why) for rank, why in archive.missing.items()})


def _is_secret(text: str) -> bool:
    return redact(text) != text


def show_secret(request: Request) -> None:
    """Leave the answer to this request as it is: it hands out a new secret, once."""
    request.state.shows_secret = True


class MaskedAnswers:
    """Masks JSON, text and live streams of the application inside."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _Masked(scope, send))


class _Masked:
    """Collects one answer, and sends it masked; a stream is masked event by event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._start: Message | None = None
        self._kind = ""
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        """Take one part of the answer."""
        if message["type"] == "http.response.start":
            self._kind = MutableHeaders(scope=message).get("content-type", "").partition(";")[0]
            if self._kind == _STREAM or not self._is_masked():
                await self._send(message)
            else:
                self._start = message
        elif message["type"] != "http.response.body" or not self._is_masked():
            await self._send(message)
        elif self._kind == _STREAM:
            await self._send({**message, "body": _masked_json(message.get("body", b""))})
        else:
            self._parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self._finish()

    def _is_masked(self) -> bool:
        if self._scope.get("state", {}).get("shows_secret", False):
            return False
        return self._kind.startswith("text/") or "json" in self._kind

    async def _finish(self) -> None:
        assert self._start is not None
        body = b"".join(self._parts)
        mask = _masked_json if "json" in self._kind else _masked_text
        body = await asyncio.to_thread(mask, body) if len(body) > _LARGE else mask(body)
        headers = MutableHeaders(scope=self._start)
        if "content-length" in headers:
            headers["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})


def _masked_json(data: bytes) -> bytes:
    return redact_json(data.decode(errors="replace")).encode(errors="replace")


def _masked_text(data: bytes) -> bytes:
    return redact(data.decode(errors="replace")).encode(errors="replace")
