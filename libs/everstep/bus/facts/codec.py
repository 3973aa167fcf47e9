"""Decodes facts for services that keep documents: from the stream, and from their own outbox."""

import logging
from collections.abc import Collection, Iterable

from everstep.bus.ports import Delivered
from everstep.messages import Fact, kind_of
from everstep.messages.codec import BadMessageError, decode, fact_in
from everstep.subjects import is_name

log = logging.getLogger(__name__)


def fact_of(message: Delivered, kinds: Collection[str]) -> Fact | None:
    """Return a fact of one of these kinds; None for others, and for invalid messages."""
    *_, job, kind = message.subject.split(".")
    if kind not in kinds:
        return None
    try:
        fact = decode(message.data)
    except BadMessageError as error:
        log.info("fact_passed_over subject=%s error=%s", message.subject, error)
        return None
    if not isinstance(fact, Fact) or (fact.job, kind_of(fact)) != (job, kind):
        return None
    if not is_name(job):
        return None
    return fact


def facts_in(outbox: Iterable[str]) -> list[Fact]:
    """Return the facts that a write has decided; any replica may record them, more than once."""
    decoded = [fact_in(text) for text in outbox]
    if None in decoded:
        log.info("facts_left count=%d", decoded.count(None))  # a newer release records them
    return [fact for fact in decoded if fact is not None]
