"""Small shared documents: compare-and-set on revision, and updates that cannot be missed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import zstandard
from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus.background import in_background
from everstep.bus.errors import BusError, ConflictError, DocumentDamagedError, MessageTooLargeError
from everstep.bus.input_failures import InputFailures
from everstep.bus.jetstream import JetStream, Stored
from everstep.bus.ports import Document

COMPRESSED_ABOVE_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
"""The most bytes that a stored body may have after decompression."""

_MAGIC = zstandard.FRAME_HEADER
_LEVEL = 1


def packed(data: bytes, name: str) -> bytes:
    """Return the bytes to store. A body that looks like a compressed one is compressed, too."""
    if len(data) > MAX_BODY_BYTES:
        raise MessageTooLargeError(name, len(data), MAX_BODY_BYTES)
    if len(data) <= COMPRESSED_ABOVE_BYTES and not data.startswith(_MAGIC):
        return data
    return zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compress(data)


def unpacked(stored: bytes, name: str) -> bytes:
    """Return the body as it was written; `DocumentDamagedError` when that is impossible."""
    if not stored.startswith(_MAGIC):
        return stored
    try:
        # The frame states its own size: refuse it before any memory is allocated.
        size = zstandard.frame_content_size(stored)
        if not 0 <= size <= MAX_BODY_BYTES:
            says = "does not say its size" if size < 0 else f"says that it has {size} bytes"
            raise DocumentDamagedError(name, f"it {says}, and {MAX_BODY_BYTES} is the limit")
        return zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DocumentDamagedError(name, str(error)) from error


log = logging.getLogger(__name__)

_OPERATION = "KV-Operation"
_MARKER = "Nats-Marker-Reason"


class Bucket:
    """One bucket on the real bus; see `everstep.bus.ports.Documents`.

    The leader of the bucket's stream is asked, because any other copy may lag behind (ADR-0096);
    only logins that may not ask it read from any copy.
    """

    def __init__(self, jetstream: JetStream, name: str, *, from_any_copy: bool = False) -> None:
        self._jetstream = jetstream
        self._name = name
        self._stream = f"KV_{name}"
        self._last = jetstream.last_anywhere if from_any_copy else jetstream.last

    async def get(self, key: str) -> Document:
        return self.document(key, await self.stored(key))

    def document(self, key: str, stored: Stored | None) -> Document:
        """Decode a stored message; `DocumentDamagedError` when that is impossible."""
        if stored is None:
            return Document(key, None, 0)
        if _is_gone(stored):
            return Document(key, None, stored.sequence)
        return Document(key, unpacked(stored.data, f"{self._name}/{key}"), stored.sequence)

    async def put(self, key: str, data: bytes, *, revision: int | None) -> int:
        return await self._write(key, packed(data, f"{self._name}/{key}"), revision, {})

    async def delete(self, key: str, *, revision: int | None) -> None:
        await self._write(key, b"", revision, {_OPERATION: "DEL"})

    async def keys(self) -> list[str]:
        prefix = subjects.document(self._name, "x")[:-1]
        listed: list[str] = []
        while True:
            answer = await self._jetstream.api(
                f"STREAM.INFO.{self._stream}",
                {"subjects_filter": f"{prefix}>", "offset": len(listed)},
            )
            page = [name.removeprefix(prefix) for name in answer["state"].get("subjects") or {}]
            listed += page
            if not page or len(listed) >= int(answer.get("total", 0)):
                break
        ours = sorted(key for key in set(listed) if subjects.is_key(key))
        last = [(key, await self.stored(key)) for key in ours]
        return [key for key, stored in last if stored is not None and not _is_gone(stored)]

    @asynccontextmanager
    async def follow(self, key: str | None = None) -> AsyncIterator[AsyncIterator[Document]]:
        connection = self._jetstream.connection
        news = _News(self, key)
        subject = subjects.document_news(self._name, key)
        with connection.noticing(up=news.verify_now):
            async with (
                connection.subscribed(subject, news.on_announced),
                in_background(news.verify_for_ever(connection.settings.verify_every_s)),
            ):
                yield news

    async def stored(self, key: str) -> Stored | None:
        """The document's last message."""
        return await self._last(self._stream, subjects.document(self._name, key))

    async def _write(
        self, key: str, data: bytes, revision: int | None, headers: dict[str, str]
    ) -> int:
        subject = subjects.document(self._name, key)
        if revision is None:
            return (await self._jetstream.publish(subject, data, headers)).seq
        written = await self._jetstream.publish_if(subject, data, revision, headers)
        if written is None and revision == 0:
            # A deleted document still has a last message: the marker of its deletion.
            last = await self.stored(key)
            if last is not None and _is_gone(last):
                written = await self._jetstream.publish_if(subject, data, last.sequence, headers)
        if written is None:
            raise ConflictError(f"{self._name}/{key}", revision)
        return written


class _News(AsyncIterator[Document]):
    """The newest unseen revision of each document; its size is bounded by their number."""

    def __init__(self, bucket: Bucket, key: str | None) -> None:
        self._bucket = bucket
        self._key = key
        self._seen: dict[str, Stored | None] = {}
        self._missed: set[str] = set()
        self._unseen: dict[str, Document] = {}
        self._changed = asyncio.Event()
        self._verify = asyncio.Event()
        self._input_failures = InputFailures(f"documents of {key or 'a bucket'}")

    async def __anext__(self) -> Document:
        while not self._unseen:
            self._changed.clear()
            await self._changed.wait()
        return self._unseen.pop(next(iter(self._unseen)))

    async def on_announced(self, message: Msg) -> None:
        headers = message.headers or {}
        key = ".".join(headers.get("Nats-Subject", "").split(".")[2:])
        sequence = headers.get("Nats-Sequence", "")
        if not subjects.is_key(key) or not (sequence.isascii() and sequence.isdecimal()):
            log.info("announcement_passed_over subject=%s", message.subject)
            return
        stored = Stored.of(headers, message.data)
        if self._is_news(key, stored):
            self._offer(key, stored)

    def verify_now(self) -> None:
        self._verify.set()

    async def verify_for_ever(self, every_s: float) -> None:
        while True:
            self._verify.clear()
            try:
                await self._read_back()
            except BusError as error:
                log.info("documents_not_verified key=%s error=%s", self._key, error)
            except Exception as error:  # noqa: BLE001  anybody may have stored anything there
                self._input_failures.note("what is stored", error)
            try:
                async with asyncio.timeout(every_s):
                    await self._verify.wait()
            except TimeoutError:
                continue

    async def _read_back(self) -> None:
        keys = [self._key] if self._key is not None else await self._bucket.keys()
        gone = [key for key, stored in self._seen.items() if stored and key not in keys]
        for key in (*keys, *gone):
            stored = await self._bucket.stored(key)
            if stored is not None:
                self._missed.discard(key)
            if self._is_news(key, stored):
                self._offer(key, stored)

    def _is_news(self, key: str, stored: Stored | None) -> bool:
        """Whether it is newer than what was seen.

        A lower revision that was written later means that the bucket was wiped and starts again;
        any other comes from a server that lags. Nothing at all is believed at the second look.
        """
        if key not in self._seen:
            return True
        before = self._seen[key]
        if stored is None:
            was_missed = key in self._missed
            self._missed.add(key)
            return before is not None and was_missed
        return before is None or stored.sequence > before.sequence or stored.at > before.at

    def _offer(self, key: str, stored: Stored | None) -> None:
        self._seen[key] = None if stored is None else replace(stored, data=b"")
        try:
            self._unseen[key] = self._bucket.document(key, stored)
        except DocumentDamagedError as error:  # the other documents are not affected
            log.error("document_passed_over key=%s error=%s", key, error)
        else:
            self._changed.set()


def _is_gone(stored: Stored) -> bool:
    return stored.headers.get(_OPERATION) in {"DEL", "PURGE"} or _MARKER in stored.headers
