"""Small shared documents: compare-and-set on revision, and news that cannot be missed."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from everstep import subjects
from everstep.bus.beside import beside
from everstep.bus.errors import BusError, ConflictError
from everstep.bus.jetstream import JetStream, Stored
from everstep.bus.ports import Document

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
        stored = await self._jetstream.last(self._stream, subjects.document(self._name, key))
        return Document(key, None, 0) if stored is None else _document(key, stored)

    async def put(self, key: str, data: bytes, *, revision: int | None) -> int:
        return await self._write(key, data, revision, {})

    async def delete(self, key: str, *, revision: int | None) -> None:
        await self._write(key, b"", revision, {_OPERATION: "DEL"})

    async def keys(self) -> list[str]:
        prefix = subjects.document(self._name, "x")[:-1]
        found: list[str] = []
        while True:
            answer = await self._jetstream.api(
                f"STREAM.INFO.{self._stream}",
                {"subjects_filter": f"{prefix}>", "offset": len(found)},
            )
            page = [name.removeprefix(prefix) for name in answer["state"].get("subjects") or {}]
            found += page
            if not page or len(found) >= int(answer.get("total", 0)):
                break
        documents = [await self.get(key) for key in sorted(set(found))]
        return [document.key for document in documents if document.data is not None]

    @asynccontextmanager
    async def follow(self, key: str | None = None) -> AsyncIterator[AsyncIterator[Document]]:
        connection = self._jetstream.connection
        news = _News(self, key)
        subject = subjects.document_news(self._name, key)
        with connection.noticing(up=news.verify_now):
            async with (
                connection.subscribed(subject, news.on_announced),
                beside(news.verify_for_ever(connection.settings.verify_every_s)),
            ):
                yield news

    async def _write(
        self, key: str, data: bytes, revision: int | None, headers: dict[str, str]
    ) -> int:
        subject = subjects.document(self._name, key)
        if revision is None:
            return (await self._jetstream.publish(subject, data, headers)).seq
        written = await self._jetstream.publish_if(subject, data, revision, headers)
        if written is None and revision == 0:
            # A deleted document still has a last message: "none there" holds all the same.
            gone = await self.get(key)
            if gone.data is None and gone.revision:
                written = await self._jetstream.publish_if(subject, data, gone.revision, headers)
        if written is None:
            raise ConflictError(f"{self._name}/{key}", revision)
        return written


class _News(AsyncIterator[Document]):
    """The newest unseen revision of each document. Its size is the number of documents."""

    def __init__(self, bucket: Bucket, key: str | None) -> None:
        self._bucket = bucket
        self._key = key
        self._seen: dict[str, int] = {}
        self._unseen: dict[str, Document] = {}
        self._changed = asyncio.Event()
        self._verify = asyncio.Event()

    async def __anext__(self) -> Document:
        while not self._unseen:
            self._changed.clear()
            await self._changed.wait()
        return self._unseen.pop(next(iter(self._unseen)))

    async def on_announced(self, message: Msg) -> None:
        headers = message.headers or {}
        key = headers.get("Nats-Subject", "").split(".", 2)[2]
        revision = int(headers["Nats-Sequence"])
        if revision > self._seen.get(key, 0):
            self._offer(_document(key, Stored(revision, message.data, headers)))

    def verify_now(self) -> None:
        self._verify.set()

    async def verify_for_ever(self, every_s: float) -> None:
        while True:
            self._verify.clear()
            try:
                await self._read_back()
            except BusError as error:
                log.info("documents_not_verified key=%s error=%s", self._key, error)
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
            document = await self._bucket.get(key)
            # An announcement that came meanwhile is newer than what we just read. A lower
            # revision without one means that the bucket was wiped and begins again.
            if self._seen.get(key) == before and document.revision != before:
                self._offer(document)

    def _offer(self, document: Document) -> None:
        self._seen[document.key] = document.revision
        self._unseen[document.key] = document
        self._changed.set()


def _document(key: str, stored: Stored) -> Document:
    gone = stored.headers.get(_OPERATION) in {"DEL", "PURGE"} or _MARKER in stored.headers
    return Document(key, None if gone else stored.data, stored.sequence)
