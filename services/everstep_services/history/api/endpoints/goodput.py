"""`/goodput`: what each second of allocations was spent on, for one job and for all."""

from datetime import datetime, timedelta
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select, union

from everstep.store import tables
from everstep.store.times import to_us
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.goodput import (
    FleetGoodput,
    Goodput,
    Timeline,
    moment,
    ratio_of,
    shown_goodput,
    shown_timeline,
)
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.parameters import (
    LITERAL,
    JobName,
    Moment,
    RequestModel,
    check_window,
)
from everstep_services.history.api.http.problems import responses
from everstep_services.history.goodput.ledger import CLASSES, TimeClass
from everstep_services.history.goodput.reader import JobNews

router = APIRouter(tags=["goodput"])

_DAY = timedelta(days=1)
_JOBS_MOST = 2000
_WORST = 20


class TimeWindow(RequestModel):
    """The window of time."""

    since: Moment | None = Field(None, description="The begin of the window of time.")
    until: Moment | None = None
    """The end of the window of time; by default now, or the end of the job."""


class TimelineWindow(RequestModel):
    """How finely to show the time."""

    most: Annotated[
        int,
        Field(ge=10, le=10_000, description="About how many parts there may be at most."),
        LITERAL,
    ] = 2000


@router.get("/jobs/{job}/goodput", summary="Where a job's time went", responses=responses(404))
async def get_goodput(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[TimeWindow, Query()]
) -> Goodput:
    """Seconds by class, over all of the job's allocations or within a window of time."""
    await check_known(context, job)
    now = context.clock.wall()
    check_window(asked.since, asked.until, now)
    parts = await context.goodput.segments(job, now.timestamp())
    until = asked.until or (moment(parts[-1].until_s) if parts else now)
    return shown_goodput(job, parts, asked.since, min(until, now))


@router.get("/jobs/{job}/timeline", summary="A job's time, in order", responses=responses(404))
async def get_timeline(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[TimelineWindow, Query()]
) -> Timeline:
    """What the time was spent on, in order, from the job's first allocation on."""
    await check_known(context, job)
    parts = await context.goodput.segments(job, context.clock.wall().timestamp())
    return shown_timeline(job, parts, asked.most)


@router.get("/goodput", summary="Where the time of all jobs went", responses=responses())
async def get_fleet_goodput(
    context: Ctx, _token: Reader, asked: Annotated[TimeWindow, Query()]
) -> FleetGoodput:
    """Seconds by class over all jobs in a window: the last 24 hours, if none is given."""
    now = context.clock.wall()
    check_window(asked.since, asked.until, now)
    until = min(asked.until or now, now)
    since = asked.since or until - _DAY
    names = await _jobs_within(context, since, until)
    sums: dict[TimeClass, float] = dict.fromkeys(CLASSES, 0.0)
    shown: list[Goodput] = []
    jobs = context.goodput.segments_of_many(names[:_JOBS_MOST], now.timestamp())
    async for name, parts in jobs:
        job_goodput = shown_goodput(name, parts, since, until)
        if job_goodput.wall_s > 0:
            shown.append(job_goodput)
        for time_class in CLASSES:
            sums[time_class] += job_goodput.seconds[time_class]
    shown.sort(key=lambda job_goodput: job_goodput.seconds["productive"] - job_goodput.wall_s)
    return FleetGoodput(
        since=since, until=until, jobs=len(shown), is_cut=len(names) > _JOBS_MOST,
        worst=shown[:_WORST], **ratio_of(sums),
    )  # fmt: skip


async def _jobs_within(context: Context, since: datetime, until: datetime) -> list[JobNews]:
    """The jobs that had an allocation in a window, the newest first."""
    here, jobs = tables.allocations.c, tables.jobs.c
    began = select(here.job).where(here.started_us < to_us(until))
    # Two questions that the index of ends answers; for one with OR, all allocations are read.
    lasting = began.where(here.ended_us.is_(None))
    ended = began.where(here.ended_us > to_us(since))
    within = union(lasting, ended).subquery()
    query = (
        select(within.c.job, jobs.last_n, jobs.facts)
        .join(tables.jobs, jobs.job == within.c.job)
        .order_by(within.c.job.desc())
        .limit(_JOBS_MOST + 1)
    )
    async with context.database.read() as connection:
        return [JobNews(*row) for row in await connection.execute(query)]
