"""The messages of a subscription: decoded, bounded, the oldest dropped for the newest."""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from everstep import subjects
from everstep.messages import Message, tag_of
from everstep.messages.codec import BadMessageError, decode

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)


class Counted(Protocol):
    """Counts the messages of one inbox by their outcome."""

    received: int
    dropped: int
    undecodable: int


class BoundedInbox(Generic[M]):
    """See `everstep.bus.ports.Inbox`. Putting never waits."""

    def __init__(self, subject: str, of: type[M], capacity: int) -> None:
        self._subject = subject
        self._of = of
        self._capacity = capacity
        self._waiting: deque[M] = deque()
        self._filled = asyncio.Event()
        self._complained = False
        self._take: Callable[[M], object] | None = None
        self.received = 0
        self.dropped = 0
        self.undecodable = 0

    def put(self, subject: str, data: bytes) -> bool:
        """Decode and keep a message; False if it is unreadable or of another type."""
        self.received += 1
        try:
            message = decode(data)
            _refuse_foreign(subject, message)
        except BadMessageError as error:
            self.undecodable += 1
            if not self._complained:
                self._complained = True
                log.warning("message_skipped subject=%s error=%s", self._subject, error)
            return False
        if not isinstance(message, self._of):
            return False
        if self._take is not None:
            self._take(message)
            return True
        if len(self._waiting) >= self._capacity:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)
        self._filled.set()
        return True

    def hear(self, subject: str, _reply: str, data: bytes) -> None:
        """Put a message that nobody is to acknowledge."""
        self.put(subject, data)

    def take_at_once(self, take: Callable[[M], object]) -> None:
        self._take = take
        while self._waiting:
            take(self._waiting.popleft())

    async def get(self) -> M:
        while not self._waiting:
            self._filled.clear()
            await self._filled.wait()
        return self._waiting.popleft()

    def __aiter__(self) -> AsyncIterator[M]:
        return self

    async def __anext__(self) -> M:
        return await self.get()


def _refuse_foreign(subject: str, message: Message) -> None:
    # The server let this sender speak for the job in the subject, and for no other.
    job = getattr(message, "job", None)
    if job is not None and subjects.job_of(subject) != job:
        raise BadMessageError(f"{subject} brought a {tag_of(message)} about another job: {job!r}")
    node = getattr(message, "node", None)
    if node == "" and subject.startswith("es.fact."):
        node = None  # the subject has none
    for kind, name in (("job", job), ("node", node)):
        if name is not None and not subjects.is_name(name):
            raise BadMessageError(f"{subject} brought an invalid name of a {kind}")
