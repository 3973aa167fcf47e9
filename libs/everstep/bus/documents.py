"""Small shared documents: compare-and-set on revision, and updates that cannot be missed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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
    """One bucket on the real bus; see `everstep.bus.ports.Documents`."""

    def __init__(self, jetstream: JetStream, name: str) -> None:
        self._jetstream = jetstream
        self._name = name
        self._stream = f"KV_{name}"

    async def get(self, key: str) -> Document:
        stored = await self._stored(key)
        return Document(key, None, 0) if stored is None else self.document(key, stored)

    def document(self, key: str, stored: Stored) -> Document:
        """Decode a stored message; `DocumentDamagedError` when that is impossible."""
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
        last = [(key, await self._stored(key)) for key in ours]
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

    async def _stored(self, key: str) -> Stored | None:
        return await self._jetstream.last(self._stream, subjects.document(self._name, key))

    async def _write(
        self, key: str, data: bytes, revision: int | None, headers: dict[str, str]
    ) -> int:
        subject = subjects.document(self._name, key)
        if revision is None:
            return (await self._jetstream.publish(subject, data, headers)).seq
        written = await self._jetstream.publish_if(subject, data, revision, headers)
        if written is None and revision == 0:
            # A deleted document still has a last message: the marker of its deletion.
            last = await self._stored(key)
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
        self._seen: dict[str, int] = {}
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
        revision = int(sequence)
        if revision > self._seen.get(key, 0):
            try:
                stored = Stored(revision, message.data, headers)
                self._offer(self._bucket.document(key, stored))
            except DocumentDamagedError as error:
                log.error("document_passed_over key=%s error=%s", key, error)

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
        gone = [key for key, revision in self._seen.items() if revision and key not in keys]
        for key in (*keys, *gone):
            before = self._seen.get(key)
            try:
                document = await self._bucket.get(key)
            except DocumentDamagedError as error:  # the other documents are not affected
                log.error("document_passed_over key=%s error=%s", key, error)
                continue
            # An announcement that came meanwhile is newer than the document just read. A lower
            # revision without an announcement means that the bucket was wiped and starts again.
            if self._seen.get(key) == before and document.revision != before:
                self._offer(document)

    def _offer(self, document: Document) -> None:
        self._seen[document.key] = document.revision
        self._unseen[document.key] = document
        self._changed.set()


def _is_gone(stored: Stored) -> bool:
    return stored.headers.get(_OPERATION) in {"DEL", "PURGE"} or _MARKER in stored.headers
