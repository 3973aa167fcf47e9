"""`/jobs/{job}/logs`: the output of ranks from the log store, where agents send it."""

from collections.abc import Awaitable
from typing import Annotated, Literal, TypeVar

from fastapi import APIRouter, Header, Query, Response
from pydantic import Field

from everstep.bus.errors import BusError
from everstep.store.times import to_us
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.rank_logs import (
    StoredLines,
    StoredRound,
    StoredRounds,
    shown_line,
    shown_round,
)
from everstep_services.history.api.http.live_stream import Lines, LogStream, check_room
from everstep_services.history.api.http.parameters import (
    LITERAL,
    NAME,
    TEXT,
    JobName,
    Moment,
    RequestModel,
    RoundNumber,
    Whole,
)
from everstep_services.history.api.http.problems import ProblemError, responses
from everstep_services.history.api.service_calls import unavailable
from everstep_services.history.rank_logs.lines import cycle_text
from everstep_services.history.rank_logs.reader import (
    LinePage,
    LogPlace,
    LogQuery,
    LogReader,
    world_of,
)
from everstep_services.history.rank_logs.search import BadRegexError

router = APIRouter(tags=["logs"])
T = TypeVar("T")

_NODES_MOST = 64
_RANKS_MOST = 256
_HOW = "start its agents with `everstep run --store-logs`, or set agent.store_logs = true"
_NEXT = "Everstep-Next"


class LineFilter(RequestModel):
    """Which lines. Unknown parameters are refused."""

    node: Annotated[list[Annotated[str, Field(pattern=NAME)]], Field(max_length=_NODES_MOST)] = (
        Field([])
    )
    """Only of these nodes."""
    rank: Annotated[list[Whole], Field(max_length=_RANKS_MOST)] = Field([])
    """Only of these ranks."""
    stream: Literal["stdout", "stderr"] | None = Field(None, description="Only of this stream.")
    since: Moment | None = None
    """Only lines that their nodes have seen at or after this moment."""
    until: Moment | None = None
    """Only lines that their nodes have seen before this moment."""
    contains: str | None = Field(None, min_length=1, max_length=256, pattern=TEXT)
    """Only lines with this text."""
    regex: str | None = Field(
        None, min_length=1, max_length=256, pattern=TEXT,
        description="Only lines in which this regular expression of Python is found.",
    )  # fmt: skip
    limit: Annotated[int, Field(ge=1, le=5000), LITERAL] = 1000
    """The most lines of a page."""
    cursor: str | None = Field(None, max_length=1024)
    """`next` of the previous page, with the same filters."""


class JobLineFilter(LineFilter):
    """Which lines of a job."""

    round: Whole | None = None
    """Only of this round; by default the newest round with output."""


@router.get("/jobs/{job}/logs", summary="The output of ranks", responses=responses(404))
async def list_lines(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[JobLineFilter, Query()]
) -> StoredLines:
    """Lines of all ranks by time, from the log store, on whichever node they were written.

    A page ends after `limit` lines, or after 16 MiB that were looked through. `next` is given at
    the end, too: what is written later follows it. Lines of a page are sorted by the clocks of
    their nodes.
    """
    reader = _stored(context, job)
    place, number = _place(context, job, asked)
    if number is None:
        number = asked.round
    if number is None:
        number = await _asked(reader.newest_round(job))
        if number is None:
            raise _nothing(f"job {job}")
    page = await _page(reader, _query(job, number, asked), place, asked.limit)
    is_nothing = asked.cursor is None and page.is_end and not page.scanned_bytes
    if is_nothing and number not in await _asked(reader.rounds(job)):
        raise _nothing(f"round {number} of job {job}")
    return StoredLines(
        job=job, round=number, items=[shown_line(line) for line in page.lines],
        next=_cursor(context, job, number, asked, page.next), is_end=page.is_end,
        scanned_bytes=page.scanned_bytes,
    )  # fmt: skip


@router.get(
    "/jobs/{job}/logs/stream",
    summary="The output of ranks, live",
    response_class=Response,
    responses={
        **responses(404),
        200: {
            "description": "Events `lines` (data: as in pages of lines; the id is `next`) and "
            "`problem` (data: `detail`), after which the stream ends.",
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
        },
    },
)
async def stream_lines(
    context: Ctx,
    token: Reader,
    job: JobName,
    asked: Annotated[JobLineFilter, Query()],
    last_event_id: Annotated[
        str | None,
        Header(
            max_length=1024, description="The id of the last event that the client has received."
        ),
    ] = None,
) -> Response:
    """Server-sent events from `cursor` on; without one, from the first line of the round.

    After a break, send the last id to miss nothing. Without `round`, the stream goes on with the
    next round when one begins.
    """
    check_room(context, token)
    first = asked.model_copy(update={"cursor": last_event_id or asked.cursor})
    page = await list_lines(context, token, job, first)

    async def after(cursor: str) -> Lines:
        return _lines(await list_lines(context, token, job, _at(asked, cursor)))

    async def next_round(number: int) -> Lines | None:
        if asked.round is not None:
            return None
        newest = await _asked(_stored(context, job).newest_round(job))
        if newest is None or newest <= number:
            return None
        begin = _cursor(context, job, newest, asked, LogPlace())
        return _lines(await list_lines(context, token, job, _at(asked, begin)))

    return LogStream(context, token, _lines(page), after, next_round)


@router.get(
    "/jobs/{job}/logs/rounds", summary="The rounds with output in the store", responses=responses()
)
async def list_log_rounds(context: Ctx, _token: Reader, job: JobName) -> StoredRounds:
    """The rounds with output in the log store, in order."""
    reader = _stored(context, job)
    return StoredRounds(job=job, rounds=await _asked(reader.rounds(job)))


@router.get(
    "/jobs/{job}/rounds/{number}/logs",
    summary="The index of a round's output",
    responses=responses(404),
)
async def get_log_index(
    context: Ctx, _token: Reader, job: JobName, number: RoundNumber
) -> StoredRound:
    """The ranks with output in the log store, how much of it, and whether that is all."""
    indexes = await _asked(_stored(context, job).indexes(job, number))
    if not indexes:
        raise _nothing(f"round {number} of job {job}")
    return shown_round(job, number, indexes)


@router.get(
    "/jobs/{job}/rounds/{number}/logs/text",
    summary="A round's output as one text, as NVRx writes it",
    response_class=Response,
    responses={
        **responses(404),
        200: {
            "description": "The lines, each after the number of its rank, padded.",
            "headers": {
                _NEXT: {
                    "description": "The `cursor` of the next part; absent at the end.",
                    "schema": {"type": "string"},
                }
            },
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
async def get_cycle_text(
    context: Ctx,
    _token: Reader,
    job: JobName,
    number: RoundNumber,
    asked: Annotated[LineFilter, Query()],
) -> Response:
    """What NVRx calls the log of a cycle, a page at a time: pages put together are the file."""
    reader = _stored(context, job)
    place, _ = _place(context, job, asked)
    indexes = await _asked(reader.indexes(job, number))
    if not indexes:
        raise _nothing(f"round {number} of job {job}")
    page = await _page(reader, _query(job, number, asked), place, asked.limit)
    text = cycle_text(page.lines, world_of(indexes))
    headers = {}
    if not page.is_end:
        headers[_NEXT] = _cursor(context, job, number, asked, page.next)
    return Response(text, media_type="text/plain", headers=headers)


def _at(asked: JobLineFilter, cursor: str) -> JobLineFilter:
    return asked.model_copy(update={"cursor": cursor})


def _lines(page: StoredLines) -> Lines:
    assert page.round is not None
    data = page.model_dump_json().encode() if page.items else b""
    return Lines(page.round, page.next, data, is_end=page.is_end)


def _query(job: str, number: int, asked: LineFilter) -> LogQuery:
    return LogQuery(
        job, number, tuple(asked.node), tuple(asked.rank), asked.stream,
        since_us=None if asked.since is None else to_us(asked.since),
        until_us=None if asked.until is None else to_us(asked.until),
        contains=asked.contains, regex=asked.regex,
    )  # fmt: skip


def _question(job: str, asked: LineFilter) -> list[object]:
    return ["logs", job, asked.model_dump(mode="json", exclude={"limit", "cursor"})]


def _place(context: Context, job: str, asked: LineFilter) -> tuple[LogPlace, int | None]:
    """Where the page begins, and the round of the cursor."""
    if asked.cursor is None:
        return LogPlace(), None
    number, after, skip = map(int, context.cursors.read(asked.cursor, _question(job, asked)))
    return LogPlace(after, skip), number


def _cursor(context: Context, job: str, number: int, asked: LineFilter, place: LogPlace) -> str:
    return context.cursors.make((number, place.after, place.skip), _question(job, asked))


async def _page(reader: LogReader, query: LogQuery, place: LogPlace, limit: int) -> LinePage:
    try:
        return await _asked(reader.page(query, place, limit))
    except BadRegexError as error:
        raise ProblemError(422, "bad_regex", str(error)) from None


async def _asked(answer: Awaitable[T]) -> T:
    """The store's answer; 503 while it cannot be asked."""
    try:
        return await answer
    except (BusError, TimeoutError) as error:
        raise unavailable(
            "bus",
            "the log store is on the bus, which cannot be reached: try again when the bus is back "
            "(`is_bus_connected` in /api/v1/status); the files are on the nodes",
        ) from error


def _stored(context: Context, job: str) -> LogReader:
    if context.bundle is not None:
        raise ProblemError(
            404,
            "logs_not_stored",
            f"an exported bundle has no log store: the ends of the logs of ranks that failed are "
            f"with the incidents of job {job}",
        )
    return LogReader(context.bus.rank_logs)


def _nothing(name: str) -> ProblemError:
    return ProblemError(
        404, "logs_not_stored", f"there is no output of {name} in the log store: {_HOW}"
    )
