"""The document of open notices on the bus, read once a term and written by compare-and-set."""

import contextlib
import logging

import msgspec

from everstep.bus.errors import ConflictError, MessageTooLargeError
from everstep.bus.ports import Bus, StreamPosition
from everstep.errors import EverstepError
from everstep.messages import NoticesDocument
from everstep.messages.codec import BadMessageError, decode_as
from everstep.messages.documents.notices import Notice
from everstep.subjects import CLUSTER
from everstep_services.history.notifications.notices import Notices, Rules

log = logging.getLogger(__name__)

BUCKET = "NOTICES"
_ENCODER = msgspec.json.Encoder()  # the body is compressed: it may be larger than a message


async def begin(bus: Bus, now: float) -> None:
    """Report what happens from `now` on, also before history leads for the first time.

    Nothing changes where there is a document already.
    """
    data = _ENCODER.encode(NoticesDocument(began_s=now))
    with contextlib.suppress(ConflictError):
        await bus.documents(BUCKET).put(CLUSTER, data, revision=0)


class UnreadableError(EverstepError):
    """What is stored cannot be read. Nothing is sent."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"the open notifications on the bus cannot be read ({why}): a newer release may have "
            f"written them; else remove key {CLUSTER} of bucket {BUCKET}"
        )


class StoredNotices:
    """The notices as of one revision of their document, with the position of their facts."""

    def __init__(self, bus: Bus) -> None:
        self._documents = bus.documents(BUCKET)
        self._revision = 0
        self.position: StreamPosition | None = None

    async def load(self, rules: Rules, now: float) -> Notices:
        """What another replica, or this one, wrote last."""
        stored = await self._documents.get(CLUSTER)
        document = NoticesDocument()
        if stored.data is not None:
            try:
                document = decode_as(stored.data, NoticesDocument)
            except BadMessageError as error:
                raise UnreadableError(str(error)) from error
        self._revision = stored.revision if stored.data is not None else 0
        self.position = None
        if document.stream:
            self.position = StreamPosition(document.stream, document.sequence)
        notices = Notices(rules, document, now)
        notices.is_changed = stored.data is None  # the time from which on messages are sent
        return notices

    async def write(self, notices: Notices) -> tuple[Notice, ...]:
        """Those that are on the bus now. `ConflictError` when another replica has written."""
        position = self.position or StreamPosition("", 0)
        while True:
            notices.is_changed = False
            document = notices.document(position.stream, position.sequence)
            data = _ENCODER.encode(document)
            try:
                self._revision = await self._documents.put(CLUSTER, data, revision=self._revision)
            except MessageTooLargeError:
                if not notices.drop_oldest():
                    raise
                log.warning("notice_dropped reason='their document is too large'")
            except BaseException:
                notices.is_changed = True
                raise
            else:
                return document.notices
