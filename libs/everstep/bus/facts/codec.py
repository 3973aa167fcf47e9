"""Facts as services that keep documents meet them: in the stream, and in what they have decided."""

import logging
from collections.abc import Collection, Iterable

from everstep.bus.ports import Delivered
from everstep.messages import Fact, kind_of
from everstep.messages.codec import BadMessageError, decode
from everstep.subjects import is_name

log = logging.getLogger(__name__)


def fact_of(message: Delivered, kinds: Collection[str]) -> Fact | None:
    """A fact of one of these kinds; None for any other, and for what cannot be read or lies."""
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
    """What a write has decided: the same facts, whoever records them, however often."""
    found: list[Fact] = []
    for text in outbox:
        try:
            fact = decode(text.encode())
        except BadMessageError as error:
            log.info("fact_left error=%s", error)  # a newer release's own replicas record it
            continue
        if isinstance(fact, Fact):
            found.append(fact)
    return found
