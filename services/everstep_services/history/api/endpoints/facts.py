"""`/facts`: the log itself, page by page or live."""

from datetime import datetime
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import Field
from sqlalchemy import ColumnElement, select

from everstep.store import tables
from everstep.store.queries import Record, facts_page, facts_span, first, place_received
from everstep.store.times import to_us
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf
from everstep_services.history.api.dto.service import FactOut
from everstep_services.history.api.http.fact_json import check_bodies, fact_json, facts_json
from everstep_services.history.api.http.list_pages import Paging
from everstep_services.history.api.http.live_stream import LiveStream, check_room, start_of
from everstep_services.history.api.http.parameters import (
    NAME,
    TEXT,
    Moment,
    RequestModel,
    Whole,
    Word,
    check_window,
)
from everstep_services.history.api.http.problems import not_found, responses

router = APIRouter(tags=["facts"])

_JSON = "application/json"


class Which(RequestModel):
    """Filters of facts, the same for pages and for streams."""

    job: str | None = Field(None, pattern=NAME, description="Only about this job.")
    kind: list[Word] | None = Field(None, max_length=50, examples=[["rank_exited", "round_ended"]])
    """Only of these kinds."""
    round: Whole | None = Field(None, description="Only of this round.")
    node: str | None = Field(None, pattern=NAME, description="Only about this node.")
    source: str | None = Field(None, max_length=256, pattern=TEXT, examples=["health"])
    """Only from this sender."""

    def conditions(self) -> list[ColumnElement[bool]]:
        """The filters as SQL; `matches` applies the same filters to one row."""
        facts = tables.facts.c
        wanted: dict[ColumnElement[Any], object] = {
            facts.job: self.job,
            facts.round: self.round,
            facts.node: self.node,
            facts.source: self.source,
        }
        equal = [column == value for column, value in wanted.items() if value is not None]
        if self.kind is None:
            return equal
        if len(self.kind) == 1:
            return [*equal, facts.kind == self.kind[0]]
        # With a job, its index is the one to use; SQLite would take that of the kind.
        kind = facts.kind if self.job is None else facts.kind.concat("")
        return [*equal, kind.in_(self.kind)]

    def matches(self, row: Record) -> bool:
        """Whether one row of the log is wanted."""
        return (
            (self.job is None or row["job"] == self.job)
            and (self.kind is None or row["kind"] in self.kind)
            and (self.round is None or row["round"] == self.round)
            and (self.node is None or row["node"] == self.node)
            and (self.source is None or row["source"] == self.source)
        )


class FactFilter(Which, Paging):
    """A page of the log."""

    since: Moment | None = None
    """Only facts at or after this moment, by the sender's clock."""
    until: Moment | None = Field(None, description="Only before this moment.")
    received_since: Moment | None = None
    """Only facts that arrived at or after this moment, by the clock of history: a sender's clock
    may be wrong."""
    received_until: Moment | None = None
    """Only facts that arrived before this moment."""
    after: Whole | None = Field(None, description="Only facts after this place in the log.")
    order: Literal["asc", "desc"] = "asc"
    """The order of their places in the log."""


class StreamFilter(Which):
    """Filters of the live stream."""

    after: Whole | None = None
    """Begin after this place in the log, 0 for the whole log; by default at its end."""


@router.get(
    "/facts", summary="Pages of the log", response_model=PageOf[FactOut], responses=responses()
)
async def list_facts(
    context: Ctx, _token: Reader, asked: Annotated[FactFilter, Query()]
) -> Response:
    """Facts in the order of the log. A page may be short when facts are large."""
    check_window(asked.since, asked.until, context.clock.wall())
    check_window(
        asked.received_since, asked.received_until, context.clock.wall(), prefix="received_"
    )
    question = asked.question("/facts")
    is_descending = asked.order == "desc"
    times = _times(asked.since, asked.until)
    conditions = [*asked.conditions(), *times]
    if times and asked.job is None and asked.node is None:
        span = await facts_span(context.database, times)
        if span is None:
            return Response(facts_json([], None), media_type=_JSON)
        conditions.append(tables.facts.c.n.between(*span))
    if asked.received_since is not None:
        place = await place_received(context.database, to_us(asked.received_since))
        conditions.append(tables.facts.c.n >= place)
    if asked.received_until is not None:
        place = await place_received(context.database, to_us(asked.received_until))
        conditions.append(tables.facts.c.n < place)
    if asked.after is not None:
        conditions.append(tables.facts.c.n > asked.after)
    behind: Any = None
    if asked.cursor is not None:
        (behind,) = context.cursors.read(asked.cursor, question)
    facts = await facts_page(
        context.database,
        conditions,
        after=behind,
        limit=asked.limit,
        most_bytes=context.settings.max_response_bytes,
        is_descending=is_descending,
    )
    if context.bundle is not None:
        check_bodies(facts.rows)
    key = facts.next_key
    next_ = None if key is None else context.cursors.make(key, question)
    return Response(facts_json(facts.rows, next_), media_type=_JSON)


@router.get(
    "/facts/stream",
    summary="The log, live",
    response_class=Response,
    responses={
        **responses(),
        200: {
            "description": "Events `fact` (data: a fact, as in pages) and `reset` (data: `reason`, "
            "`n`): the client was behind another database, and hears from `n` on. While the bus is "
            "away, no facts come: an event `bus` (data: `is_connected`) tells the begin and the "
            "end. An event `problem` (data: `detail`, `code`) is the last one of a damaged bundle.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def stream_facts(
    context: Ctx,
    token: Reader,
    asked: Annotated[StreamFilter, Query()],
    last_event_id: Annotated[
        str | None,
        Header(
            max_length=128, description="The id of the last event that the client has received."
        ),
    ] = None,
) -> Response:
    """Server-sent events. After a break, send the last id to miss nothing."""
    check_room(context, token)
    head = await context.feed.head()
    start = start_of(last_event_id, asked.after, epoch=context.epoch, last_n=head.last_n)
    context.feed.notifier.announce(head.last_n)
    return LiveStream(context, token, start, asked.matches)


@router.get("/facts/{id}", summary="One fact", response_model=FactOut, responses=responses(404))
async def get_fact(
    context: Ctx,
    _token: Reader,
    id_: Annotated[str, Path(alias="id", pattern=NAME, description="The fact's id.")],
) -> Response:
    """A fact by its id."""
    query = select(tables.facts).where(tables.facts.c.id == id_)
    row = await first(context.database, query)
    if row is None:
        raise not_found(f"fact {id_}")
    if context.bundle is not None:
        check_bodies([row])
    return Response(fact_json(row), media_type=_JSON)


def _times(since: datetime | None, until: datetime | None) -> list[ColumnElement[bool]]:
    at_us = tables.facts.c.at_us
    conditions: list[ColumnElement[bool]] = []
    if since is not None:
        conditions.append(at_us >= to_us(since))
    if until is not None:
        conditions.append(at_us < to_us(until))
    return conditions
