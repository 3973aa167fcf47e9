"""`/jobs/{job}/stragglers` and `/timings`: slow ranks of the past, and how ranks compare now."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import func, select

from everstep.messages import Question, RankScoreTable, Reply, ShowScores, ShowTimings, TimingTable
from everstep.slow_rank_causes import SlowRankCause
from everstep.store import tables
from everstep.store.queries import SortOrder, first, is_over, job_state, page, slow_ranks
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.stragglers import (
    RanksCompared,
    SlowRank,
    StepShift,
    Timings,
    shown_slow_rank,
)
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import (
    LITERAL,
    NAME,
    TEXT,
    JobName,
    RequestModel,
    Whole,
)
from everstep_services.history.api.http.problems import ProblemError, responses
from everstep_services.history.api.service_calls import problems_of
from everstep_services.history.operator_requests import NoSuchJobError, ask

router = APIRouter(tags=["slow ranks"])

_OPEN_MOST = 1000
_SECTIONS_NAMED = 20
R = TypeVar("R", bound=Reply)


Measure = Literal["own", "ratio", "waited", "step", "cpu", "runnable", "round_trip", "section"]


class SlowRankFilter(Paging):
    """Filters of findings."""

    state: Literal["open", "cleared"] | None = Field(None, description="Only in this state.")
    cause: list[SlowRankCause] | None = Field(None, max_length=10, examples=[["input", "host"]])
    """Only with one of these causes."""
    node: str | None = Field(None, pattern=NAME, description="Only on this node.")
    rank: Whole | None = Field(None, description="Only this rank.")
    round: Whole | None = Field(None, description="Only in this round.")
    order: Literal["asc", "desc"] = "desc"
    """The order of their places in the log."""


class ShiftFilter(Paging):
    """Filters of changes of the step time."""

    round: Whole | None = Field(None, description="Only in this round.")
    order: Literal["asc", "desc"] = "desc"
    """The order of their places in the log."""


class ScoresWanted(RequestModel):
    """Parameters of the comparison of ranks."""

    most: Annotated[int, Field(ge=1, le=4096), LITERAL] = 100
    """The number of ranks, beginning with the slowest."""
    role: str = Field("", max_length=256, pattern=TEXT, description="Only this role group.")


class TimingsWanted(RequestModel):
    """The part of the table to show."""

    measure: Measure | None = None
    """The measure; by default `own`, or `section` if a section is named."""
    section: str = Field("", max_length=256, pattern=TEXT, examples=["data"])
    """The section to show the time of."""
    first_rank: Whole = Field(0, description="The first rank to show.")
    most_ranks: Annotated[int, Field(ge=1, le=4096), LITERAL] = 512
    """The most ranks to show."""
    most_windows: Annotated[int, Field(ge=1, le=1000), LITERAL] = 60
    """The most windows to show; the latest are shown."""


@router.get("/jobs/{job}/stragglers", summary="A job's slow ranks", responses=responses(404))
async def list_stragglers(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[SlowRankFilter, Query()]
) -> PageOf[SlowRank]:
    """Each finding about a slow rank, with its cause and price, and how it ended; newest first."""
    await check_known(context, job)
    return await _found(context, job, asked, f"/jobs/{job}/stragglers")


@router.get("/stragglers", summary="Slow ranks of all jobs", responses=responses())
async def list_all_stragglers(
    context: Ctx, _token: Reader, asked: Annotated[SlowRankFilter, Query()]
) -> PageOf[SlowRank]:
    """Each finding about a slow rank of any job; newest first."""
    return await _found(context, None, asked, "/stragglers")


async def _found(
    context: Context, job: str | None, asked: SlowRankFilter, place: str
) -> PageOf[SlowRank]:
    columns = tables.stragglers.c
    query = slow_ranks(job, asked.state)
    wanted = {columns.node: asked.node, columns.rank: asked.rank, columns.round: asked.round}
    for column, value in wanted.items():
        if value is not None:
            query = query.where(column == value)
    if asked.cause:
        query = query.where(columns.cause.in_(asked.cause))
    order = SortOrder((columns.n,), is_descending=asked.order == "desc")
    rows = await paged(context, query, order, asked, place)
    return PageOf[SlowRank](items=[shown_slow_rank(row) for row in rows.rows], next=rows.next)


@router.get(
    "/jobs/{job}/stragglers/now", summary="How ranks compare, now", responses=responses(404)
)
async def compare_ranks(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[ScoresWanted, Query()]
) -> RanksCompared:
    """The ranks of the newest round by their own time, the slowest first. This is not stored."""
    await check_known(context, job)
    question = ShowScores(job=job, most=asked.most, role=asked.role)
    table = await ask_straggler(context, "scores", question, RankScoreTable)
    newest = SortOrder((tables.stragglers.c.n,), is_descending=True)
    findings = await page(context.database, slow_ranks(job, "open"), newest, None, _OPEN_MOST)
    shown = [shown_slow_rank(row) for row in findings.rows]
    note = table.said if table.ranks else await _end_of(context, job) or table.said
    more: dict[str, Any] = {"job": job, "note": note or None, "found": shown}
    if table.window and not table.is_by_time:
        more["window"] = table.window + await steps_before(context, job, table.round)
    fields = {**msgspec.structs.asdict(table), **more}
    return RanksCompared.model_validate(fields, from_attributes=True)


@router.get("/jobs/{job}/timings", summary="Ranks by windows, now", responses=responses(404))
async def get_timings(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[TimingsWanted, Query()]
) -> Timings:
    """Where the time went, for each rank and window; null where nothing was measured."""
    await check_known(context, job)
    measure = measure_of(asked.measure, asked.section)
    question = ShowTimings(
        job=job,
        measure=measure,
        section=asked.section,
        first_rank=asked.first_rank,
        most_ranks=asked.most_ranks,
        most_windows=asked.most_windows,
    )
    table = await ask_straggler(context, "timings", question, TimingTable)
    if asked.section and table.sections and asked.section not in table.sections:
        raise ProblemError(422, "no_such_section", _sections(job, asked.section, table.sections))
    before = 0 if table.is_by_time else await steps_before(context, job, table.round)
    windows = [
        {"first_step": first + before, "last_step": last + before} for first, last in table.windows
    ]
    more = {"job": job, "section": asked.section or None, "windows": windows}
    fields = {**msgspec.structs.asdict(table), **more}
    return Timings.model_validate(fields, from_attributes=True)


@router.get("/jobs/{job}/step-shifts", summary="When steps changed", responses=responses(404))
async def list_step_shifts(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[ShiftFilter, Query()]
) -> PageOf[StepShift]:
    """When the steps of the whole job became slower or faster without a slow rank."""
    await check_known(context, job)
    shifts = tables.step_shifts.c
    rounds = tables.rounds.c
    columns = [column for column in shifts if column.name != "step"]
    step = (shifts.step + func.coalesce(rounds.first_step, 1) - 1).label("step")
    of_round = (rounds.job == shifts.job) & (rounds.round == shifts.round)
    query = select(*columns, step).outerjoin(tables.rounds, of_round)
    query = query.where(shifts.job == job, shifts.n.is_not(None))
    if asked.round is not None:
        query = query.where(shifts.round == asked.round)
    order = SortOrder((shifts.n,), is_descending=asked.order == "desc")
    rows = await paged(context, query, order, asked, f"/jobs/{job}/step-shifts")
    return PageOf[StepShift](items=[StepShift(**present(row)) for row in rows.rows], next=rows.next)


async def steps_before(context: Context, job: str, number: int) -> int:
    """How many steps a round did not make because earlier ones had; windows count from its start.

    0 while its first step is not on record, as where nobody counts steps.
    """
    rounds = tables.rounds.c
    query = select(rounds.first_step).where(rounds.job == job, rounds.round == number)
    row = await first(context.database, query)
    return max(0, ((row and row["first_step"]) or 1) - 1)


def measure_of(measure: Measure | None, section: str) -> Measure:
    """The measure that is meant; 400 where section and measure contradict each other."""
    meant: Measure = measure or ("section" if section else "own")
    if (meant == "section") != bool(section):
        detail = "`section` names the section of the measure `section`: give both, or neither"
        raise ProblemError(400, "bad_measure", detail)
    return meant


def _sections(job: str, wanted: str, sections: Sequence[str]) -> str:
    """The text of an unknown section, with the names of the sections there are."""
    names = [name for name in sections if name]
    more = ", …" if len(names) > _SECTIONS_NAMED else ""
    text = f"use one of {', '.join(names[:_SECTIONS_NAMED])}{more}" if names else "it has none"
    return f"job {job} has no section {wanted!r}: {text}"


async def _end_of(context: Context, job: str) -> str:
    """The text for a job that has ended, and how to see its slow ranks; else empty."""
    query = select(job_state().label("state")).where(tables.jobs.c.job == job, is_over())
    row = await first(context.database, query)
    if row is None:
        return ""
    see = f"everstep stragglers {job} --history shows its slow ranks"
    return f"job {job} has ended ({row['state']}): {see}"


async def ask_straggler(context: Context, verb: str, question: Question, of: type[R]) -> R:
    """The answer of straggler, or a problem with the reason why there is none."""
    see = f"stragglers {question.job} --history"
    with problems_of("straggler", refused=(422, "refused")):
        try:
            return await ask(context.bus, "straggler", verb, question, of, see=see)
        except NoSuchJobError as error:
            detail = await _end_of(context, question.job) or (
                f"no timings of job {question.job} have arrived: it does not run, has sent none "
                f"yet, or straggler.timings is off"
            )
            raise ProblemError(404, "not_found", detail) from error
