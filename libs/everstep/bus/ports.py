"""The interface of the bus. The real bus and the fake of the tests both implement it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from everstep.messages import BlobRef, Fact, Message
from everstep.messages.rank_logs import LogIndex, LogPiece

M = TypeVar("M", bound=Message)
M_co = TypeVar("M_co", bound=Message, covariant=True)
SERVER_GRACE_S = 15.0
"""Clients leave a server that is cut off, or was killed, within half of this time."""
PROOF_BYTES = 64 * 1024
"""As large as many facts: a smaller proof would still fit on a disk that is almost full."""
Handler = Callable[[Message], Awaitable[Message]]
"""Answers one question. The asker receives an `EverstepError`; any other exception is a bug."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """One fact as the stream holds it: not decoded, because readers skip what they cannot read."""

    sequence: int
    subject: str
    data: bytes


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """How far a reader is. Keep it in the same transaction as what was read.

    `stream` names the stream's incarnation: after its data were wiped the sequence starts
    again, and only together are the two a position.
    """

    stream: str
    sequence: int


@dataclass(frozen=True, slots=True)
class FactBatch:
    """Facts in stream order, and the position after the last of them."""

    position: StreamPosition
    facts: Sequence[Delivered]
    missed: int = 0
    """Facts before these that the stream had dropped before they could be read: its limits
    are too small, or the reader was away for too long."""


class FactReader(Protocol):
    """Reads on from a position, in order and without gaps, through every reconnect.

    A fact may come a second time after the stream was wiped or set back: know it by its id.
    """

    async def fetch(self, most: int, within_s: float) -> FactBatch:
        """Up to `most` facts, as soon as there are any; none after `within_s`."""


class Inbox(Protocol[M_co]):
    """The unread messages of one subscription: bounded, the oldest is dropped for the newest."""

    dropped: int
    undecodable: int

    def __aiter__(self) -> AsyncIterator[M_co]: ...

    async def get(self) -> M_co:
        """Return the oldest message; wait for one if there is none."""

    def take_at_once(self, take: Callable[[M_co], object]) -> None:
        """Pass those that wait to `take`, and from now on each message as it arrives."""


@dataclass(frozen=True, slots=True)
class Document:
    """A small piece of shared state, as of one revision. `data` is None when there is none."""

    key: str
    data: bytes | None
    revision: int
    """Grows with each write. Pass it back to write only if no other process has written."""


class Documents(Protocol):
    """One bucket of small documents, changed by compare-and-set."""

    async def get(self, key: str) -> Document: ...

    async def put(self, key: str, data: bytes, *, revision: int | None) -> int:
        """Write, and return the new revision.

        With a revision (0: the document must not exist) the write happens only if that is still
        the newest, else `ConflictError`. None overwrites any document.
        """

    async def delete(self, key: str, *, revision: int | None) -> None: ...

    async def keys(self) -> list[str]: ...

    def follow(
        self, key: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Document]]:
        """Yield the current document, then each newer one; without a key, of the whole bucket.

        Verified: re-read on every reconnect and every `verify_every_s`, so that an
        announcement that was lost makes an update late, never missed. Intermediate revisions may
        be skipped.
        """


@dataclass(frozen=True, slots=True)
class Held:
    """A lease that we hold. Send `token` with every act: a lower one must be refused."""

    name: str
    holder: str
    ttl_s: int
    token: int
    """Grows with each renewal and each change of hands."""


class Leases(Protocol):
    """At most one holder a name at a time, by the server's clock."""

    async def acquire(self, name: str, holder: str, ttl_s: int) -> Held | None:
        """Return the lease, or None while another process has it."""

    async def renew(self, held: Held) -> Held:
        """Extend it by its time to live; `LeaseLostError` when it is no longer ours."""

    async def release(self, held: Held) -> None: ...


class Blobs(Protocol):
    """Evidence: compressed, immutable, named by its hash, gone after a maximum age."""

    async def put(self, job: str, data: bytes) -> BlobRef: ...

    async def get(self, ref: BlobRef) -> bytes:
        """Return the verified content; `BlobMissingError` when a part is missing or differs."""

    async def remove(self, job: str) -> None:
        """Remove all blobs of a job."""

    async def keeps_s(self) -> float | None:
        """Return the seconds for which the server keeps a blob; None for ever."""


@dataclass(frozen=True, slots=True)
class LogScope:
    """Whose output; None for all."""

    job: str
    round: int | None = None
    node: str | None = None
    rank: int | None = None
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class StoredPiece:
    """A piece, and its place in the store."""

    sequence: int
    piece: LogPiece


@dataclass(frozen=True, slots=True)
class LogPage:
    """Pieces in the order in which they arrived."""

    pieces: Sequence[StoredPiece]
    after: int
    """Where the next page begins."""
    is_end: bool
    """There were no more at that moment."""
    unreadable: int = 0
    """Messages that are not pieces, and were skipped."""


class RankLogs(Protocol):
    """The log store: output of ranks, gone after a maximum age or when the store is full."""

    async def put(self, piece: LogPiece) -> None:
        """Store a piece. A second copy within two minutes is not stored again."""

    async def put_index(self, index: LogIndex) -> None:
        """Replace the index of this node and round."""

    async def read(
        self, wanted: LogScope, after: int, *, since_us: int | None, most_bytes: int
    ) -> LogPage:
        """The next pieces behind a place; with `since_us` and `after=0`, those that came then."""

    async def rounds(self, job: str) -> list[int]:
        """The rounds with output from any node, in order."""

    async def indexes(self, job: str, round: int) -> list[LogIndex]:
        """What each node has sent of a round."""

    async def remove(self, job: str, round: int | None = None) -> None:
        """Remove the output of a job, or of one round of it."""


class Bus(Protocol):
    """The bus as one process sees it. A lost server only delays; `send` never raises."""

    @property
    def connected(self) -> bool: ...

    @property
    def returns(self) -> int:
        """How often the connection was lost and came back, however short it was away."""

    async def wait_connected(self) -> None:
        """Return as soon as there is a connection."""

    def send(self, subject: str, message: Message) -> None:
        """Fire and forget. Without a server the newest messages wait; the oldest are dropped."""

    async def record(self, *facts: Fact) -> None:
        """Keep facts. On return they are on this disk, and the stream will receive each, once."""

    async def flush(self, within_s: float) -> None:
        """Wait until the stream has acknowledged every fact recorded so far."""

    async def deliver(self, subject: str, message: Message, *, within_s: float) -> bool:
        """Send a message, and return whether a subscriber received it.

        True when one subscriber has it in its inbox. False, at once, when the server reports that
        no connection subscribes: the receiver is gone or cut off from the server. A `BusError`
        when neither is certain: `BusTimeoutError` when a subscriber exists but did not answer,
        which a connection that is just breaking causes, too (try again), and
        `BusUnreachableError` while this process has no connection or has just reconnected.
        """

    def subscribe(
        self, subject: str, of: type[M], *, capacity: int = 4096
    ) -> AbstractAsyncContextManager[Inbox[M]]:
        """Subscribe; messages of other types and undecodable ones are skipped and counted.

        A message about another job than its subject counts as undecodable: the server allows its
        sender the subject's job only. A message sent by `deliver` is acknowledged once it is in
        the inbox.
        """

    def facts(self, after: StreamPosition | None) -> AbstractAsyncContextManager[FactReader]:
        """Read the whole stream of facts from a position, or from its start."""

    async def ask(
        self, service: str, verb: str, question: Message, of: type[M], *, job: str, within_s: float
    ) -> M:
        """Return the answer to a question, or raise the `AskError` that says why there is none."""

    def answer(
        self, service: str, handlers: Mapping[str, Handler]
    ) -> AbstractAsyncContextManager[None]:
        """Answer questions by verb, as one of any number of replicas."""

    def documents(self, bucket: str) -> Documents: ...

    @property
    def leases(self) -> Leases: ...

    @property
    def blobs(self) -> Blobs: ...

    @property
    def rank_logs(self) -> RankLogs: ...

    async def prove(self, size_bytes: int = PROOF_BYTES) -> None:
        """Write something and read it back, or raise the error that says why not.

        It fails where most servers of a cluster cannot be reached, so that nothing may be decided.
        """

    async def prove_servers(self) -> None:
        """As `prove`, and raise while any server of a cluster has been silent for a short time.

        Its clients live, but cannot be heard here. After `SERVER_GRACE_S` they have left it.
        """
