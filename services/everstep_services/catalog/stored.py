"""What is stored about a job's checkpoints, and the facts that it is made from."""

import msgspec

from everstep.bus import decided
from everstep.bus.ports import Delivered, Document, StreamPosition
from everstep.errors import EverstepError
from everstep.messages import CheckpointsDocument, Fact, kind_of
from everstep.messages.codec import encode
from everstep_services.catalog.domain.facts import READ
from everstep_services.catalog.domain.index import Index

BUCKET = "CHECKPOINTS"
_ENCODER = msgspec.json.Encoder()  # the body is compressed: it may be larger than a message
_DECODER = msgspec.json.Decoder(CheckpointsDocument)
_KINDS = frozenset(kind_of(one) for one in READ)


class UnreadableError(EverstepError):
    """What is stored is no document of ours. Nothing of it is decided on."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"what the bus holds about the checkpoints of {key} cannot be read ({why}): a newer "
            f"release may have written it; else remove key {key} of bucket {BUCKET}, and scan"
        )


class Stored:
    """A job's index as of one revision."""

    def __init__(self, document: Document) -> None:
        try:
            found = (
                CheckpointsDocument() if document.data is None else _DECODER.decode(document.data)
            )
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableError(document.key, str(error)) from error
        self.job = document.key
        self.revision = document.revision if document.data is not None else 0
        self.index = Index(document.key, found)
        self.stream, self.sequence = found.stream, found.sequence
        self.outbox = found.outbox
        """Facts in it that may not be recorded."""
        self._before = self.index.document("", 0, ())

    @property
    def is_changed(self) -> bool:
        """It is not what was read."""
        return bool(self.index.facts) or self.index.document("", 0, ()) != self._before

    @property
    def said(self) -> tuple[str, ...]:
        """What was decided since it was read."""
        return tuple(encode(fact).decode() for fact in self.index.facts)

    def has_read(self, position: StreamPosition) -> bool:
        """The fact at this place is in it already."""
        return self.stream == position.stream and position.sequence <= self.sequence

    def encoded(self) -> bytes:
        """What to write."""
        return _ENCODER.encode(
            self.index.document(self.stream, self.sequence, self.outbox + self.said)
        )

    def settle(self, revision: int) -> None:
        """It was written, and what it decided is on record."""
        self.revision = revision
        self.outbox = self.said
        self.index.facts = []
        self._before = self.index.document("", 0, ())


def fact_of(message: Delivered) -> Fact | None:
    """A fact about checkpoints; None for any other, and for what cannot be read."""
    return decided.fact_of(message, _KINDS)
