"""Decodes what the stream delivered into facts for the log, whatever the bytes are."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

from everstep.bus.ports import Delivered
from everstep.messages import Fact, kind_of
from everstep.messages.codec import BadMessageError, Envelope, UnknownMessageError, decode, envelope
from everstep.store.log import NewFact
from everstep.store.times import to_us
from everstep.subjects import is_name


@dataclass(slots=True)
class DecodedBatch:
    """A decoded batch: the facts to keep, and the messages that could not be decoded."""

    facts: list[NewFact] = field(default_factory=list)
    unknown: dict[str, int] = field(default_factory=dict)
    """How many of each unknown tag: kept as they are, and projected by a later release."""
    refused: list[tuple[str, str]] = field(default_factory=list)
    """Subject and reason of each message that is not a fact."""


def decode_batch(delivered: Sequence[Delivered]) -> DecodedBatch:
    """Decode each message. Nothing is raised, whatever the bytes are."""
    batch = DecodedBatch()
    for message in delivered:
        try:
            batch.facts.append(_fact(message))
        except UnknownMessageError as error:
            try:
                batch.facts.append(_raw(message))
                batch.unknown[error.tag] = batch.unknown.get(error.tag, 0) + 1
            except BadMessageError as worse:
                batch.refused.append((message.subject, str(worse)))
        except BadMessageError as error:
            batch.refused.append((message.subject, str(error)))
    return batch


def _fact(message: Delivered) -> NewFact:
    fact = decode(message.data)
    if not isinstance(fact, Fact):
        raise BadMessageError(f"a {kind_of(fact)} is not a fact", message.data)
    return _new(message, fact, _kind(type(fact)), getattr(fact, "node", None) or None, fact)


def _raw(message: Delivered) -> NewFact:
    outer = envelope(message.data)
    return _new(message, outer, outer.type.rpartition(".")[0], None, None)


def _new(
    message: Delivered, header: Fact | Envelope, kind: str, node: str | None, fact: Fact | None
) -> NewFact:
    # The server lets an agent write on its own job's subjects only, so the subject is what
    # can be trusted: a fact that says otherwise is another job's, or a lie.
    if message.subject.split(".")[2:] != [header.job, kind] or not is_name(header.job):
        raise BadMessageError(
            f"it says job {header.job} and kind {kind} on the subject {message.subject}",
            message.data,
        )
    if not is_name(header.id):
        raise BadMessageError(f"its id {header.id[:40]!r} is not an id", message.data)
    blob = getattr(fact, "blob", None)
    if blob is not None and blob.job != header.job:  # else a job could read out another's
        raise BadMessageError(f"its blob is of another job, {blob.job[:40]!r}", message.data)
    if node is not None and not is_name(node):
        raise BadMessageError(
            f"it names a node {node[:40]!r}, which is not a valid name", message.data
        )
    try:
        body = message.data.decode()
    except UnicodeDecodeError as error:  # in a field that this release does not know
        raise BadMessageError(f"it is not Unicode: {error.reason}", message.data) from error
    return NewFact(
        message.sequence,
        header.id,
        header.job,
        kind,
        header.round,
        node,
        to_us(header.at),
        header.source,
        body,
        fact,
    )


@cache
def _kind(of: type[Fact]) -> str:
    return kind_of(of)
