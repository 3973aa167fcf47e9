"""Batches of questions, and what is told to those who ask; facts that wait in a document."""

import asyncio
import logging

from everstep.bus.requests import RefusalError
from everstep.messages import Done, Fact, Leave, Message, Report, Reported
from everstep.messages.codec import BadMessageError, decode
from everstep_services.rendezvous.domain.events import Event

log = logging.getLogger(__name__)

Batch = list[tuple[Event, asyncio.Future[Message] | None]]
"""Events, each with whoever waits for the answer."""


def no_such_job(job: str, batch: Batch) -> None:
    """Its document was lost, or there never was one: agents that run ranks run on."""
    for event, answer in batch:
        if answer is None or answer.done():
            continue
        if isinstance(event, Report):
            answer.set_result(Reported(round=event.round, is_current=False))
        elif isinstance(event, Leave):
            answer.set_result(Done(text="there is no such job"))
    refuse(batch, RefusalError("404", f"there is no job {job}: join it first"))


def fact_in(text: str) -> Fact | None:
    """A fact of the outbox; None for one of a newer release: its own replicas record it."""
    try:
        found = decode(text.encode())
    except BadMessageError as error:
        log.info("fact_left error=%s", error)
        return None
    return found if isinstance(found, Fact) else None


def refuse(batch: Batch, error: RefusalError) -> None:
    for _, answer in batch:
        if answer is not None and not answer.done():
            answer.set_exception(error)
