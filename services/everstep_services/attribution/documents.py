"""The cases of a job as of one revision of their document."""

import msgspec

from everstep.bus.facts import codec
from everstep.bus.ports import Delivered, Document, StreamPosition
from everstep.errors import EverstepError
from everstep.messages import CasesDocument, Fact, kind_of
from everstep.messages.codec import encode
from everstep_services.attribution.domain import case_facts, past
from everstep_services.attribution.domain.case_facts import JobCases

BUCKET = "CASES"
_ENCODER = msgspec.json.Encoder()  # the body is compressed: it may be larger than a message
_DECODER = msgspec.json.Decoder(CasesDocument)
_KINDS = frozenset(kind_of(fact_type) for fact_type in (*case_facts.READ, *past.READ))
_PENDING_MOST = 10_000


class UnreadableCasesError(EverstepError):
    """The document of a job cannot be decoded; nothing is decided about it."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(
            f"the document about incidents of {key} cannot be read ({why}): a newer release may "
            f"have written it; otherwise remove key {key} of bucket {BUCKET}"
        )


class StoredCases:
    """The cases of a job, and which facts are in them."""

    def __init__(self, document: Document) -> None:
        try:
            decoded = CasesDocument() if document.data is None else _DECODER.decode(document.data)
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableCasesError(document.key, str(error)) from error
        self.job = document.key
        self.revision = document.revision if document.data is not None else 0
        self.cases = JobCases(document.key, decoded)
        self.position = StreamPosition(decoded.stream, decoded.sequence)
        self.outbox = decoded.outbox
        """Facts in the stored document that may not have been recorded yet."""
        self.decided: list[Fact] = []
        """Facts to record with the next write."""
        self.pending: list[tuple[StreamPosition, Fact]] = []
        """Facts that were added since the document was stored."""
        self.has_news = False
        """Whether a case has changed, and must be written soon."""

    def has_read(self, at: StreamPosition) -> bool:
        """Whether the document already has the fact at this position."""
        return self.position.stream == at.stream and at.sequence <= self.position.sequence

    def take(self, at: StreamPosition, fact: Fact) -> str | None:
        """Add a fact. Returns the incident whose case has changed."""
        if self.has_read(at):
            return None
        before = self.cases.document.cases
        incident = self.cases.take(fact)
        self.position = at
        if self.cases.document.cases is not before:
            self.has_news = True
        if len(self.pending) < _PENDING_MOST:
            self.pending.append((at, fact))
        return incident

    def encoded(self) -> bytes:
        """Return the document to write."""
        facts = tuple(encode(fact).decode() for fact in self.decided)
        document = msgspec.structs.replace(
            self.cases.document,
            stream=self.position.stream,
            sequence=self.position.sequence,
            outbox=(*self.outbox, *facts),
        )
        return _ENCODER.encode(document)

    def settle(self, revision: int) -> None:
        """The document was written, and its decided facts were recorded."""
        self.revision = revision
        self.outbox = tuple(encode(fact).decode() for fact in self.decided)
        self.decided, self.pending, self.has_news = [], [], False


def cluster_document(data: bytes | None) -> CasesDocument:
    """The document of all jobs."""
    try:
        return CasesDocument() if data is None else _DECODER.decode(data)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnreadableCasesError("_cluster", str(error)) from error


def encoded(document: CasesDocument) -> bytes:
    """Return the bytes of a document."""
    return _ENCODER.encode(document)


def fact_of(message: Delivered) -> Fact | None:
    """Return a fact about incidents or nodes; None for any other, and for an unreadable one."""
    return codec.fact_of(message, _KINDS)
