"""The bus in memory: the same promises, no server, and a switch to cut it off."""

import asyncio
import fnmatch
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import xxhash

from everstep import subjects
from everstep.bus.errors import (
    AskRefusedError,
    AskTimeoutError,
    BlobMissingError,
    BusTimeoutError,
    BusUnreachableError,
    ConflictError,
    FactsWaitingError,
    LeaseLostError,
    NobodyAnswersError,
)
from everstep.bus.inbox import BoundedInbox
from everstep.bus.ports import (
    Delivered,
    Document,
    FactBatch,
    Handler,
    Held,
    LogPage,
    LogScope,
    M,
    StoredPiece,
    StreamPosition,
)
from everstep.bus.requests import RefusalError, check_kind
from everstep.errors import EverstepError
from everstep.messages import BlobRef, Fact, Message, kind_of
from everstep.messages.codec import encode
from everstep.messages.rank_logs import LogIndex, LogPiece


@dataclass
class MemoryServer:
    """What all clients share. `up = False` cuts everybody off."""

    up: bool = True
    acknowledges: bool = True
    """False: the other servers of its cluster cannot be reached."""
    returns: int = 0
    wipes: int = 0
    facts: list[Delivered] = field(default_factory=list)
    fact_ids: set[str] = field(default_factory=set)
    documents: dict[str, dict[str, Document]] = field(default_factory=dict)
    revision: int = 0
    leases: dict[str, tuple[Held, float]] = field(default_factory=dict)
    blobs: dict[BlobRef, bytes] = field(default_factory=dict)
    log_pieces: dict[int, LogPiece] = field(default_factory=dict)
    log_count: int = 0
    log_indexes: dict[tuple[str, int, str], LogIndex] = field(default_factory=dict)
    inboxes: list[tuple[str, BoundedInbox[Message]]] = field(default_factory=list)
    answers: dict[str, list[Mapping[str, Handler]]] = field(default_factory=dict)
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def announce(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def tell(self, subject: str, data: bytes) -> int:
        """Put it into every inbox that hears the subject; how many took it."""
        heard = [inbox for pattern, inbox in self.inboxes if _matches(pattern, subject)]
        return sum([inbox.put(subject, data) for inbox in heard])

    async def wipe(self) -> None:
        self.wipes += 1
        self.facts.clear()
        self.fact_ids.clear()
        self.documents.clear()
        self.revision = 0
        await self.announce()

    async def set_up(self, up: bool) -> None:
        self.returns += up and not self.up
        self.up = up
        await self.announce()


class MemoryBus:
    """See `everstep.bus.ports.Bus`."""

    def __init__(self, server: MemoryServer, capacity: int = 4096) -> None:
        self._server = server
        self._waiting: deque[tuple[str, Message]] = deque(maxlen=capacity)
        self._spool: deque[Fact] = deque()

    @property
    def connected(self) -> bool:
        return self._server.up

    @property
    def returns(self) -> int:
        return self._server.returns

    async def wait_connected(self) -> None:
        async with self._server.changed:
            await self._server.changed.wait_for(lambda: self._server.up)

    def send(self, subject: str, message: Message) -> None:
        self._waiting.append((subject, message))
        self._deliver()

    def _deliver(self) -> None:
        while self._server.up and self._waiting:
            subject, message = self._waiting.popleft()
            self._server.tell(subject, encode(message))

    async def deliver(self, subject: str, message: Message, *, within_s: float) -> bool:
        self._need_server()
        if not any(_matches(pattern, subject) for pattern, _ in self._server.inboxes):
            return False
        if self._server.tell(subject, encode(message)):
            return True
        raise BusTimeoutError(f"no answer to {subject} within {within_s:g} s")

    async def record(self, *facts: Fact) -> None:
        self._spool.extend(facts)
        await self._empty_spool()

    async def _empty_spool(self) -> None:
        while self._server.up and self._spool:
            fact = self._spool.popleft()
            if fact.id not in self._server.fact_ids:
                self._server.fact_ids.add(fact.id)
                subject = subjects.fact(fact.job, kind_of(fact))
                number = len(self._server.facts) + 1
                self._server.facts.append(Delivered(number, subject, encode(fact)))
                self._server.tell(subject, encode(fact))
        await self._server.announce()

    async def flush(self, within_s: float) -> None:
        await self._empty_spool()
        if self._spool:
            raise FactsWaitingError(f"{len(self._spool)} facts wait")

    @asynccontextmanager
    async def subscribe(
        self, subject: str, of: type[M], *, capacity: int = 4096
    ) -> AsyncIterator[BoundedInbox[M]]:
        inbox = BoundedInbox(subject, of, capacity)
        entry: tuple[str, BoundedInbox[Message]] = (subject, inbox)  # type: ignore[assignment]
        self._server.inboxes.append(entry)
        try:
            yield inbox
        finally:
            self._server.inboxes.remove(entry)

    @asynccontextmanager
    async def facts(self, after: StreamPosition | None) -> AsyncIterator["_MemoryReader"]:
        yield _MemoryReader(self._server, after)

    async def ask(
        self, service: str, verb: str, question: Message, of: type[M], *, job: str, within_s: float
    ) -> M:
        self._need_server()
        replicas = [r for r in self._server.answers.get(service, []) if verb in r]
        if not replicas:
            raise NobodyAnswersError(f"nobody answers {service}.{verb}")
        if getattr(question, "job", None) != job:
            raise AskRefusedError(service, verb, "403", "another job")
        try:
            check_kind(service, verb, question)
            async with asyncio.timeout(within_s):
                answer = await replicas[0][verb](question)
        except TimeoutError as error:
            raise AskTimeoutError(f"{service} did not answer {verb}") from error
        except RefusalError as error:
            raise AskRefusedError(service, verb, error.code, str(error)) from error
        except EverstepError as error:
            raise AskRefusedError(service, verb, "422", str(error)) from error
        except Exception as error:
            raise AskRefusedError(service, verb, "500", "failed") from error
        if not isinstance(answer, of):
            raise AskRefusedError(service, verb, "502", f"answered with {type(answer).__name__}")
        return answer

    @asynccontextmanager
    async def answer(self, service: str, handlers: Mapping[str, Handler]) -> AsyncIterator[None]:
        replicas = self._server.answers.setdefault(service, [])
        replicas.append(handlers)
        try:
            yield
        finally:
            replicas.remove(handlers)

    def documents(self, bucket: str) -> "MemoryDocuments":
        return MemoryDocuments(self._server, bucket)

    @property
    def leases(self) -> "MemoryLeases":
        return MemoryLeases(self._server)

    @property
    def blobs(self) -> "MemoryBlobs":
        return MemoryBlobs(self._server)

    @property
    def rank_logs(self) -> "MemoryRankLogs":
        return MemoryRankLogs(self._server)

    async def prove_servers(self) -> None:
        await self.prove()

    async def prove(self, size_bytes: int = 0) -> None:
        self._need_server()
        if not self._server.acknowledges:
            raise BusTimeoutError(f"no answer to a write of {size_bytes} bytes")

    def statistics(self) -> dict[str, float]:
        return {"connected": float(self.connected)}

    def _need_server(self) -> None:
        if not self._server.up:
            raise BusUnreachableError("no connection")


class _MemoryReader:
    def __init__(self, server: MemoryServer, after: StreamPosition | None) -> None:
        self._server = server
        self._position = after

    async def fetch(self, most: int, within_s: float) -> FactBatch:
        server = self._server
        try:
            async with asyncio.timeout(within_s), server.changed:
                await server.changed.wait_for(lambda: server.up and bool(self._next(1)))
        except TimeoutError:
            self._next(0)
        facts = self._next(most) if server.up else []
        assert self._position is not None
        if facts:
            self._position = StreamPosition(self._position.stream, facts[-1].sequence)
        return FactBatch(self._position, facts)

    def _next(self, most: int) -> list[Delivered]:
        stream = f"memory-{self._server.wipes}"
        if self._position is None or self._position.stream != stream:
            self._position = StreamPosition(stream, 0)
        return self._server.facts[self._position.sequence :][:most]


class MemoryDocuments:
    def __init__(self, server: MemoryServer, bucket: str) -> None:
        self._server = server
        self._bucket = bucket

    @property
    def _here(self) -> dict[str, Document]:
        return self._server.documents.setdefault(self._bucket, {})

    async def get(self, key: str) -> Document:
        self._need_server()
        subjects.document(self._bucket, key)
        return self._here.get(key, Document(key, None, 0))

    async def put(self, key: str, data: bytes, *, revision: int | None) -> int:
        return await self._write(key, data, revision)

    async def delete(self, key: str, *, revision: int | None) -> None:
        await self._write(key, None, revision)

    async def _write(self, key: str, data: bytes | None, revision: int | None) -> int:
        now = await self.get(key)
        fresh = revision == 0 and now.data is None
        if revision is not None and revision != now.revision and not fresh:
            raise ConflictError(f"{self._bucket}/{key}", revision)
        self._server.revision += 1
        self._here[key] = Document(key, data, self._server.revision)
        await self._server.announce()
        return self._server.revision

    async def keys(self) -> list[str]:
        self._need_server()
        return sorted(key for key, document in self._here.items() if document.data is not None)

    def follow(
        self, key: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Document]]:
        return _following(self, self._server, key)

    def _need_server(self) -> None:
        if not self._server.up:
            raise BusUnreachableError("no connection")


@asynccontextmanager
async def _following(
    documents: MemoryDocuments, server: MemoryServer, key: str | None
) -> AsyncIterator[AsyncIterator[Document]]:
    async def news() -> AsyncGenerator[Document, None]:
        seen: dict[str, int] = {}
        while True:
            async with server.changed:
                here = documents._here
                fresh = [
                    document
                    for name, document in here.items()
                    if (key is None or name == key) and document.revision != seen.get(name)
                ]
                if key is not None and key not in seen and not fresh:
                    fresh = [Document(key, None, 0)]
                if not fresh or not server.up:
                    await server.changed.wait()
                    continue
            for document in fresh:
                seen[document.key] = document.revision
                yield document

    stream = news()
    try:
        yield stream
    finally:
        await stream.aclose()


class MemoryLeases:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def acquire(self, name: str, holder: str, ttl_s: int) -> Held | None:
        found = self._server.leases.get(name)
        if found is not None and found[1] > _now():
            return None
        return self._grant(name, holder, ttl_s)

    async def renew(self, held: Held) -> Held:
        self._check(held)
        return self._grant(held.name, held.holder, held.ttl_s)

    async def release(self, held: Held) -> None:
        found = self._server.leases.get(held.name)
        if found is not None and found[0].token == held.token:
            del self._server.leases[held.name]

    def _check(self, held: Held) -> None:
        found = self._server.leases.get(held.name)
        if found is None or found[0].token != held.token or found[1] <= _now():
            raise LeaseLostError(held.name, held.token)

    def _grant(self, name: str, holder: str, ttl_s: int) -> Held:
        self._server.revision += 1
        held = Held(name, holder, ttl_s, self._server.revision)
        self._server.leases[name] = (held, _now() + ttl_s)
        return held


class MemoryBlobs:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def put(self, job: str, data: bytes) -> BlobRef:
        ref = BlobRef(job=job, id=xxhash.xxh3_128_hexdigest(data), size_bytes=len(data), parts=1)
        self._server.blobs[ref] = data
        return ref

    async def get(self, ref: BlobRef) -> bytes:
        if ref not in self._server.blobs:
            raise BlobMissingError(f"{ref} is gone")
        return self._server.blobs[ref]

    async def remove(self, job: str) -> None:
        for ref in [ref for ref in self._server.blobs if ref.job == job]:
            del self._server.blobs[ref]

    async def keeps_s(self) -> float | None:
        return 30 * 86_400.0


class MemoryRankLogs:
    def __init__(self, server: MemoryServer) -> None:
        self._server = server

    async def put(self, piece: LogPiece) -> None:
        self._need_server()
        if piece not in self._server.log_pieces.values():
            self._server.log_count += 1
            self._server.log_pieces[self._server.log_count] = piece

    async def put_index(self, index: LogIndex) -> None:
        self._need_server()
        self._server.log_indexes[index.job, index.round, index.node] = index

    async def read(
        self, wanted: LogScope, after: int, *, since_us: int | None, most_bytes: int
    ) -> LogPage:
        self._need_server()
        behind = [
            StoredPiece(sequence, piece)
            for sequence, piece in self._server.log_pieces.items()
            if sequence > after and _is_of(piece, wanted)
        ]
        page: list[StoredPiece] = []
        while len(page) < len(behind) and sum(len(one.piece.data) for one in page) < most_bytes:
            page.append(behind[len(page)])
        last = page[-1].sequence if page else after
        return LogPage(page, last, is_end=len(page) == len(behind))

    async def rounds(self, job: str) -> list[int]:
        self._need_server()
        return sorted({round for of, round, _ in self._server.log_indexes if of == job})

    async def indexes(self, job: str, round: int) -> list[LogIndex]:
        self._need_server()
        found = sorted(self._server.log_indexes.items())
        return [index for key, index in found if key[:2] == (job, round)]

    async def remove(self, job: str, round: int | None = None) -> None:
        self._need_server()
        wanted = LogScope(job, round)
        for sequence, piece in list(self._server.log_pieces.items()):
            if _is_of(piece, wanted):
                del self._server.log_pieces[sequence]
        for key in list(self._server.log_indexes):
            if key[0] == job and round in {None, key[1]}:
                del self._server.log_indexes[key]

    def _need_server(self) -> None:
        if not self._server.up:
            raise BusUnreachableError("no connection")


def _is_of(piece: LogPiece, wanted: LogScope) -> bool:
    return piece.job == wanted.job and all(
        value is None or value == getattr(piece, name)
        for name in ("round", "node", "rank", "stream")
        for value in (getattr(wanted, name),)
    )


def _now() -> float:
    return asyncio.get_running_loop().time()


def _matches(pattern: str, subject: str) -> bool:
    ours, theirs = pattern.split("."), subject.split(".")
    if ours[-1] == ">":
        return len(theirs) >= len(ours) and _matches(
            ".".join(ours[:-1]), ".".join(theirs[: len(ours) - 1])
        )
    return len(ours) == len(theirs) and all(
        fnmatch.fnmatchcase(there, here) if here == "*" else here == there
        for here, there in zip(ours, theirs, strict=True)
    )
