"""What is stored about nodes, and the facts that it is made from: bytes in, bytes out."""

import msgspec

from everstep import subjects
from everstep.bus import decided
from everstep.bus.ports import Delivered, Document, StreamPosition
from everstep.errors import EverstepError
from everstep.messages import Fact, NodesDocument, kind_of
from everstep.messages.codec import encode
from everstep_services.health.nodes.distrust import NodeRules
from everstep_services.health.nodes.evidence import READ
from everstep_services.health.nodes.register import Register
from everstep_services.health.settings import NodeSettings

KEY = subjects.CLUSTER
_KINDS = frozenset(kind_of(one) for one in READ)
_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(NodesDocument)


class UnreadableError(EverstepError):
    """What is stored about nodes is no document of ours. Nothing of it is decided on."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"what the bus holds about nodes cannot be read ({why}): a newer release may have "
            f"written it; else look at key {KEY} of bucket NODES, and remove it"
        )


class Stored:
    """The register as of one revision."""

    def __init__(self, document: Document, rules: NodeRules) -> None:
        try:
            found = NodesDocument() if document.data is None else _DECODER.decode(document.data)
        except (msgspec.DecodeError, ValueError) as error:
            raise UnreadableError(str(error)) from error
        self.revision = document.revision if document.data is not None else 0
        self.position = StreamPosition(found.stream, found.sequence) if found.stream else None
        self.outbox = found.outbox
        """Facts in it that may not be recorded."""
        self.is_untidy = False
        """Facts in it are recorded."""
        self.register = Register(found, rules)

    def settle(self, position: StreamPosition, said: tuple[str, ...]) -> None:
        """It was written, and what it decided is on record: the next write leaves that out."""
        self.register.facts, self.register.is_changed = [], False
        self.position = position
        self.is_untidy = bool(said)

    @property
    def said(self) -> tuple[str, ...]:
        """What was decided since it was read."""
        return tuple(encode(fact).decode() for fact in self.register.facts)

    def encoded(self, position: StreamPosition | None) -> bytes:
        """What to write."""
        at = position or StreamPosition("", 0)
        document = self.register.document(at.stream, at.sequence, self.outbox + self.said)
        return _ENCODER.encode(document)


def fact_of(message: Delivered) -> Fact | None:
    """A fact about nodes; None for any other, and for what cannot be read or lies of its job."""
    return decided.fact_of(message, _KINDS)


def rules_of(settings: NodeSettings) -> NodeRules:
    """What nodes are judged by."""
    return NodeRules(
        strikes_limit=settings.strikes_limit,
        strikes_window_s=settings.strikes_window_s,
        check_windows=settings.check_windows,
        check_window_s=settings.check_window_s,
        distrust_ratio=settings.distrust_ratio,
        distrust_nodes=settings.distrust_nodes,
        exclude_ttl_s=settings.exclude_ttl_s,
        exclude_most=settings.exclude_most,
        breaker_ratio=settings.breaker_ratio,
        breaker_window_s=settings.breaker_window_s,
    )
