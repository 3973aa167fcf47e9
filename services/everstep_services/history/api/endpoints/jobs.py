"""`/jobs`: jobs, their rounds, and the members and exits of rounds."""

from collections import Counter
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import ColumnElement, Select, exists, func, select

from everstep.job_states import WITH_RANKS, RoundState
from everstep.store import tables
from everstep.store.queries import (
    Record,
    SortOrder,
    first,
    has_label,
    holds,
    is_begun,
    job_state,
    jobs_with_state,
    page,
    round_detail,
    round_state,
    shown_rounds,
    with_verdict,
)
from everstep.store.times import from_us
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.jobs import (
    Allocation,
    Exit,
    Job,
    JobDetail,
    Member,
    Round,
    RoundDetail,
    Stall,
    Watch,
    shown_exit,
    shown_job,
    shown_round,
)
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import (
    NAME,
    TEXT,
    Flag,
    JobName,
    RoundNumber,
    Word,
)
from everstep_services.history.api.http.problems import ProblemError, not_found, responses
from everstep_services.history.api.service_calls import no_such_job

router = APIRouter(tags=["jobs"])

_MOST_ALLOCATIONS = 100
_MOST_SHOWN = 1000
_MOST_EXITS = 200
_WORST_FIRST = ("off", "paused", "learning", "armed")
_STATES_MOST = 20

_SORTS: Mapping[str, SortOrder] = {
    "created": SortOrder((tables.jobs.c.first_n,)),
    "-created": SortOrder((tables.jobs.c.first_n,), is_descending=True),
    "updated": SortOrder((tables.jobs.c.last_n,)),
    "-updated": SortOrder((tables.jobs.c.last_n,), is_descending=True),
    "job": SortOrder((tables.jobs.c.job,)),
    "-job": SortOrder((tables.jobs.c.job,), is_descending=True),
}


class JobFilter(Paging):
    """Filters of the list of jobs."""

    state: list[Word] | None = Field(None, max_length=10, examples=[["running"]])
    """Only in one of these states."""
    user: str | None = Field(None, max_length=128, pattern=TEXT)
    """Only jobs that this user has started."""
    label: list[Word] | None = Field(None, max_length=10, examples=[["team:vision"]])
    """Only jobs with this label, as `name:value`; with several, only jobs with all of them."""
    q: str | None = Field(None, max_length=128, pattern=TEXT)
    """Only jobs whose id or name contains this text, in upper or lower case."""
    sort: Literal["created", "-created", "updated", "-updated", "job", "-job"] = "-created"
    """The order; `-` for descending. With `updated`, jobs move while you turn pages."""


class RoundFilter(Paging):
    """Filters of the rounds of a job."""

    state: RoundState | None = Field(None, description="Only in this state.")
    cause: str | None = Field(None, max_length=64, pattern=TEXT, examples=["node_lost"])
    """Only rounds that ended for this reason."""
    order: Literal["asc", "desc"] = Field("desc", description="The order of their numbers.")


class ExitFilter(Paging):
    """Filters of the exits of a round."""

    failed: Flag | None = None
    """True for failures only, false for other exits only."""
    node: str | None = Field(None, pattern=NAME, description="Only on this node.")


def _jobs() -> Select[Any]:
    of_end = tables.incidents.c.incident == tables.jobs.c.end_incident
    query = with_verdict(jobs_with_state(), tables.jobs, of_end)
    return query.where(is_begun())


def _rounds(job: str) -> Select[Any]:
    return shown_rounds().where(tables.rounds.c.job == job)


def _job(context: Context, row: Record) -> dict[str, Any]:
    """The job as a client sees it, while ranks run with the step of their last beats."""
    step = context.beats.step(row["job"], row["round"]) if row["state"] in WITH_RANKS else None
    return {**shown_job(row), **({} if step is None else {"last_step": step})}


def _round(context: Context, row: Record) -> dict[str, Any]:
    """Likewise for a round."""
    step = None if row["ended_fact"] else context.beats.step(row["job"], row["round"])
    return {**shown_round(row), **({} if step is None else {"last_step": step})}


@router.get("/jobs", summary="List jobs", responses=responses())
async def list_jobs(
    context: Ctx, _token: Reader, asked: Annotated[JobFilter, Query()]
) -> PageOf[Job]:
    """Jobs, the newest first. A page stays the same while new jobs begin."""
    query = _jobs().where(*_job_conditions(asked))
    listing = await paged(context, query, _SORTS[asked.sort], asked, "/jobs")
    return PageOf[Job](items=[Job(**_job(context, row)) for row in listing.rows], next=listing.next)


@router.get("/jobs/{job}", summary="One job", responses=responses(404))
async def get_job(context: Ctx, _token: Reader, job: JobName) -> JobDetail:
    """A job, the state of its stall detection, and its allocations."""
    row = await first(context.database, _jobs().where(tables.jobs.c.job == job))
    if row is None:
        raise await no_such_job(context, job)
    allocations = tables.allocations
    query = select(allocations).where(allocations.c.job == job)
    newest = SortOrder((allocations.c.first_n, allocations.c.allocation), is_descending=True)
    listing = await page(context.database, query, newest, None, _MOST_ALLOCATIONS)
    shown = [Allocation(**present(row)) for row in listing.rows]
    watch = await _watch_of(context, row)
    return JobDetail(**_job(context, row), watch=watch, allocations=shown)


@router.get("/jobs/{job}/rounds", summary="A job's rounds", responses=responses(404))
async def list_rounds(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[RoundFilter, Query()]
) -> PageOf[Round]:
    """Rounds by number, the newest first."""
    await check_known(context, job)
    conditions: list[ColumnElement[bool]] = []
    if asked.state is not None:
        conditions.append(round_state() == asked.state)
    if asked.cause is not None:
        conditions.append(tables.rounds.c.end_cause == asked.cause)
    order = SortOrder((tables.rounds.c.round,), is_descending=asked.order == "desc")
    query = _rounds(job).where(*conditions)
    listing = await paged(context, query, order, asked, f"/jobs/{job}/rounds")
    return PageOf[Round](
        items=[Round(**_round(context, row)) for row in listing.rows], next=listing.next
    )


@router.get("/jobs/{job}/rounds/{number}", summary="One round", responses=responses(404))
async def get_round(context: Ctx, _token: Reader, job: JobName, number: RoundNumber) -> RoundDetail:
    """A round with its members, its exits and its stalls."""
    detail = await round_detail(
        context.database, job, number, most=_MOST_SHOWN, most_exits=_MOST_EXITS
    )
    if detail is None:
        raise not_found(f"round {number} of job {job}")
    lists = [detail.pop(name) for name in ("members", "exits", "stalls_seen")]
    members, exits, stalls = lists
    return RoundDetail(
        **_round(context, detail),
        members=[Member(**present(row)) for row in members],
        exits=[shown_exit(row) for row in exits],
        stalls_seen=[Stall(**present(row)) for row in stalls],
        is_cut=len(exits) == _MOST_EXITS or _MOST_SHOWN in {len(members), len(stalls)},
    )


@router.get(
    "/jobs/{job}/rounds/{number}/members", summary="A round's members", responses=responses(404)
)
async def list_members(
    context: Ctx,
    _token: Reader,
    job: JobName,
    number: RoundNumber,
    asked: Annotated[Paging, Query()],
) -> PageOf[Member]:
    """Nodes with a slot, by slot."""
    await check_known(context, job, number)
    members = tables.round_members
    query = select(members).where(members.c.job == job, members.c.round == number)
    place = f"/jobs/{job}/rounds/{number}/members"
    listing = await paged(context, query, SortOrder((members.c.slot,)), asked, place)
    return PageOf[Member](items=[Member(**present(row)) for row in listing.rows], next=listing.next)


@router.get(
    "/jobs/{job}/rounds/{number}/exits", summary="A round's exits", responses=responses(404)
)
async def list_exits(
    context: Ctx,
    _token: Reader,
    job: JobName,
    number: RoundNumber,
    asked: Annotated[ExitFilter, Query()],
) -> PageOf[Exit]:
    """Ranks that ended by themselves, in the order of the log."""
    await check_known(context, job, number)
    exits = tables.rank_exits
    query = select(exits).where(exits.c.job == job, exits.c.round == number)
    if asked.failed is not None:
        query = query.where(exits.c.is_failure.is_(asked.failed))
    if asked.node is not None:
        query = query.where(exits.c.node == asked.node)
    place = f"/jobs/{job}/rounds/{number}/exits"
    listing = await paged(context, query, SortOrder((exits.c.n,)), asked, place)
    return PageOf[Exit](items=[shown_exit(row) for row in listing.rows], next=listing.next)


async def check_known(context: Context, job: str, number: int | None = None) -> None:
    """Answer 404 when there is no such job on record, or no such round of it."""
    if number is None:
        query: Select[Any] = select(tables.jobs.c.job).where(tables.jobs.c.job == job, is_begun())
        if await first(context.database, query) is None:
            raise await no_such_job(context, job)
        return
    rounds = tables.rounds.c
    query = select(rounds.job).where(rounds.job == job, rounds.round == number)
    if await first(context.database, query) is None:
        raise not_found(f"round {number} of job {job}")


def _job_conditions(asked: JobFilter) -> list[ColumnElement[bool]]:
    jobs = tables.jobs.c
    conditions: list[ColumnElement[bool]] = []
    if asked.state:
        conditions.append(job_state().in_(asked.state))
    if asked.user is not None:
        conditions.append(jobs.user == asked.user)
    if asked.q is not None:
        conditions.append(holds(jobs.job, asked.q) | holds(jobs.name, asked.q))
    for label in asked.label or ():
        name, colon, value = label.partition(":")
        if not colon or not name:
            raise ProblemError(400, "bad_label", "a label filter is `name:value`")
        conditions.append(has_label(name, value))
    return conditions


async def _watch_of(context: Context, job: Record) -> Watch | None:
    """The state of stall detection, as the agents of the newest round reported it last."""
    if job["state"] not in WITH_RANKS:
        reason = f"no ranks run: the job is {job['state']}"
        return Watch(state="off", reason=reason, at=None, node=None, nodes={})
    watches, members = tables.node_watches.c, tables.round_members.c
    takes_part = exists().where(
        members.job == watches.job, members.round == job["round"], members.node == watches.node
    )
    state_column = watches.watch_state
    columns = (state_column, watches.watch_reason, watches.watch_us, watches.node)
    nodes = func.count().over(partition_by=state_column).label("nodes")
    place = func.row_number().over(partition_by=state_column, order_by=watches.node).label("place")
    here = select(*columns, nodes, place).where(watches.job == job["job"], takes_part).subquery()
    # In one query: an agent may report another state at any moment.
    query = select(here).where(here.c.place == 1)
    by_state = SortOrder((here.c.watch_state,))
    listing = await page(context.database, query, by_state, None, _STATES_MOST)
    rows = {str(row["watch_state"]): row for row in listing.rows}
    if not rows:
        return _watch_by_beats(context, job)
    counts = {state: int(row["nodes"]) for state, row in rows.items()}
    state = _worst(counts)
    worst = rows[state]
    return Watch(
        state=state,
        reason=worst["watch_reason"],
        at=from_us(worst["watch_us"]),
        node=worst["node"],
        nodes=counts,
    )


def _watch_by_beats(context: Context, job: Record) -> Watch | None:
    nodes = context.beats.view(job["job"]).nodes
    counts = Counter(node.beat.watch for node in nodes if node.beat.watch)
    if not counts:
        return None
    state = _worst(counts)
    node = next(node.beat.node for node in nodes if node.beat.watch == state)
    reason = "as its agent says; nothing is on record yet"
    return Watch(state=state, reason=reason, at=None, node=node, nodes=counts)


def _worst(counts: Counter[str] | dict[str, int]) -> str:
    """The worst known state; a state from a later release counts as the least bad."""
    return next((state for state in _WORST_FIRST if state in counts), min(counts))
