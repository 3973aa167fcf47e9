"""`/jobs/{job}/checkpoints`: all checkpoints, where they are, their state, and requests about them.

The catalog answers. While it is away there is what is on record, and nothing that depends on it.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import Field
from sqlalchemy import ColumnElement, Select, case, func, select

from everstep.bus.errors import BusDeniedError
from everstep.messages import (
    CheckpointCommitted,
    CheckpointDeleted,
    CheckpointPlace,
    CheckpointsCollected,
    CheckpointsLocated,
    CollectCheckpoints,
    ListCheckpoints,
    LocateCheckpoint,
    kind_of,
)
from everstep.messages.base import shared
from everstep.messages.codec import fact_in
from everstep.store import tables
from everstep.store.queries import Record, SortOrder, first, is_begun, job_state, page
from everstep.store.times import to_us
from everstep_services.history.api.context import Context, Ctx, Operator, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.checkpoints import (
    Checkpoint,
    Checkpoints,
    Collected,
    JobSaves,
    JudgedOut,
    LocatedCheckpoints,
    NodeSaveDelay,
    RejectedOut,
    Restores,
    SaveDelay,
    Saves,
    TierSaves,
)
from everstep_services.history.api.dto.operators import (
    CheckpointWanted,
    CollectionWanted,
    Decided,
    ScanWanted,
)
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import (
    LITERAL,
    Flag,
    JobName,
    Moment,
    Whole,
    Word,
)
from everstep_services.history.api.http.problems import not_found, responses
from everstep_services.history.api.service_calls import asker, do, no_such_job, problems_of
from everstep_services.history.operator_requests import (
    LOOK_WITHIN_S,
    RequestError,
    ask,
)

router = APIRouter(tags=["checkpoints"])

_MOST = 1000
_ON_RECORD = tuple(kind_of(item) for item in (CheckpointCommitted, CheckpointDeleted))
Step = Annotated[Whole, Path(description="The step.")]
Tier = Literal["global", "memory", "peer"]
_STATES = Field(
    None,
    max_length=10,
    description="Only saves of jobs in one of these states.",
    examples=[["running"]],
)
Action = Literal["pin", "unpin", "verify", "quarantine", "release", "delete"]


class SavesFilter(Paging):
    """Filters of how saving goes, over all jobs."""

    state: list[Word] | None = _STATES
    failing: Flag | None = None
    """True for tiers where the last save has failed, false for the others."""
    heard_since: Moment | None = None
    """Only jobs whose last fact arrived at this moment or later."""


class SaveDelayFilter(Paging):
    """Filters of nodes whose saves wait, over all jobs."""

    state: list[Word] | None = _STATES
    waiting: Flag | None = None
    """True for nodes whose saves wait now, false for the others."""


@router.get("/jobs/{job}/checkpoints", summary="A job's checkpoints", responses=responses(404))
async def list_checkpoints(
    context: Ctx,
    _token: Reader,
    job: JobName,
    limit: Annotated[
        int, Field(ge=1, le=_MOST), LITERAL, Query(description="At most this number of the newest.")
    ] = 100,
    tier: Annotated[Tier | None, Query(description="Only in this tier.")] = None,
) -> Checkpoints:
    """All checkpoints, quarantined and missing ones included, the newest first."""
    await check_known(context, job)
    try:
        places = await _list(context, job, limit, tier or "")
    except (RequestError, BusDeniedError) as error:
        items = await _on_record(context, job, limit) if tier in {None, "global"} else []
        note = f"{error}; these were committed and are not known to be deleted"
        return Checkpoints(job=job, items=items, is_live=False, note=note)
    return Checkpoints(job=job, items=[_shown(place) for place in places], is_live=True, note=None)


@router.get("/jobs/{job}/saves", summary="The state of saves", responses=responses(404))
async def get_saves(context: Ctx, _token: Reader, job: JobName) -> JobSaves:
    """The newest commit and failure of each tier, saves that wait, and what was restored."""
    await check_known(context, job)
    saves, delays, restores = tables.job_saves, tables.save_delays, tables.job_restores
    by_tier = SortOrder((saves.c.tier,))
    tiers = await page(context.database, select(saves).where(saves.c.job == job), by_tier, None, 10)
    waits = case((func.coalesce(delays.c.waiting, 0) > 0, 0), else_=1).label("waits")
    first_those_that_wait = SortOrder((waits, delays.c.node))
    query = select(delays, waits).where(delays.c.job == job)
    waiting = await page(context.database, query, first_those_that_wait, None, _MOST)
    restored = await first(context.database, select(restores).where(restores.c.job == job))
    return JobSaves(
        job=job,
        tiers=[Saves(**present(row), is_failing=_is_failing(row)) for row in tiers.rows],
        delays=[SaveDelay(**present(row)) for row in waiting.rows],
        restore=None if restored is None else Restores(**present(restored)),
    )


@router.get("/saves", summary="The state of saves of all jobs", responses=responses())
async def list_saves(
    context: Ctx, _token: Reader, asked: Annotated[SavesFilter, Query()]
) -> PageOf[TierSaves]:
    """The newest commit and failure of each tier of each job, by job."""
    saves = tables.job_saves.c
    query = _of_jobs(select(tables.job_saves), saves.job, asked.state)
    if asked.heard_since is not None:
        query = query.where(tables.jobs.c.updated_us >= to_us(asked.heard_since))
    if asked.failing is not None:
        committed_n, has_failed = func.coalesce(saves.committed_n, -1), saves.failed_n.is_not(None)
        query = query.where((has_failed & (saves.failed_n > committed_n)).is_(asked.failing))
    by_job = SortOrder((saves.job, saves.tier))
    listing = await paged(context, query, by_job, asked, "/saves")
    items = [TierSaves(**present(row), is_failing=_is_failing(row)) for row in listing.rows]
    return PageOf[TierSaves](items=items, next=listing.next)


@router.get("/save-delays", summary="Saves that wait, of all jobs", responses=responses())
async def list_save_delays(
    context: Ctx, _token: Reader, asked: Annotated[SaveDelayFilter, Query()]
) -> PageOf[NodeSaveDelay]:
    """Nodes whose saves wait for their storage, or did not fit, by job."""
    delays = tables.save_delays.c
    query = _of_jobs(select(tables.save_delays), delays.job, asked.state)
    if asked.waiting is not None:
        query = query.where((func.coalesce(delays.waiting, 0) > 0).is_(asked.waiting))
    by_job = SortOrder((delays.job, delays.node))
    listing = await paged(context, query, by_job, asked, "/save-delays")
    items = [NodeSaveDelay(**present(row)) for row in listing.rows]
    return PageOf[NodeSaveDelay](items=items, next=listing.next)


def _is_failing(row: Record) -> bool:
    """By the order of the log: clocks of nodes may differ."""
    failed_n, committed_n = row["failed_n"], row["committed_n"]
    return failed_n is not None and (committed_n is None or failed_n > committed_n)


def _of_jobs(
    query: Select[Any], job: ColumnElement[str], states: Sequence[str] | None
) -> Select[Any]:
    """Only the rows of jobs that have begun, and are in one of the states."""
    query = query.join(tables.jobs, tables.jobs.c.job == job).where(is_begun())
    return query.where(job_state().in_(states)) if states else query


@router.get(
    "/jobs/{job}/checkpoints:locate", summary="What would be restored", responses=responses(404)
)
async def locate_checkpoint(
    context: Ctx,
    _token: Reader,
    job: JobName,
    step: Annotated[Whole | None, Query(description="Only this step.")] = None,
) -> LocatedCheckpoints:
    """Checkpoints that the newest round can restore, the newest first, and those that it cannot."""
    query = select(tables.jobs).where(tables.jobs.c.job == job, is_begun())
    row = await first(context.database, query)
    if row is None:
        raise await no_such_job(context, job)
    question = LocateCheckpoint(
        job=job, round=row["round"] or 0, world_size=row["world_size"] or 0, step=step
    )
    with problems_of("catalog"):
        reply = await ask(
            context.bus, "catalog", "locate", question, CheckpointsLocated, see=f"ckpt ls {job}"
        )
    return LocatedCheckpoints(
        job=job,
        places=[_shown(place) for place in reply.places],
        rejected=[RejectedOut(**msgspec.structs.asdict(item)) for item in reply.rejected],
    )


@router.get("/jobs/{job}/checkpoints/{step}", summary="One checkpoint", responses=responses(404))
async def get_checkpoint(
    context: Ctx,
    _token: Reader,
    job: JobName,
    step: Step,
    tier: Annotated[
        Tier | None, Query(description="The tier, if the checkpoint is in several.")
    ] = None,
) -> Checkpoint:
    """A checkpoint, and the nodes that hold its parts. Its history is at `/facts?job=…`."""
    await check_known(context, job)
    with problems_of("catalog"):
        places = await _list(context, job, _MOST, tier or "")
    checkpoint = next((place for place in places if place.step == step), None)
    if checkpoint is None:
        raise not_found(f"checkpoint of step {step} of job {job}")
    return _shown(checkpoint)


@router.post(
    "/jobs/{job}/checkpoints:scan",
    summary="Compare the index with the files",
    status_code=202,
    responses=responses(404, 409),
)
async def scan_checkpoints(context: Ctx, by: Operator, job: JobName, wanted: ScanWanted) -> Decided:
    """The answer lists the checkpoints that the catalog has found in the files."""
    return await do(context, by, "scan", job, wanted)


@router.post(
    "/jobs/{job}/checkpoints:collect",
    summary="Delete what retention does not keep",
    status_code=202,
    responses=responses(404, 409),
)
async def collect_checkpoints(
    context: Ctx, by: Operator, job: JobName, wanted: CollectionWanted
) -> Collected:
    """The answer lists what stays, what is deleted, and why.

    Nothing is deleted unless `is_dry_run` is false.
    """
    await check_known(context, job)
    who, why = asker(by, wanted), wanted.reason
    question = CollectCheckpoints(job=job, by=who, reason=why, origin="rest", **wanted.details())
    with problems_of("catalog", refused=(409, "refused")):
        reply = await ask(
            context.bus, "catalog", "collect", question, CheckpointsCollected, see=f"ckpt ls {job}"
        )
    judged = [JudgedOut(**msgspec.structs.asdict(item)) for item in reply.judged]
    return Collected(job=job, judged=judged, text=reply.text)


@router.post(
    "/jobs/{job}/checkpoints/{step}:{action}",
    summary="Pin, verify, quarantine, release or delete a checkpoint",
    status_code=202,
    responses=responses(404, 409),
)
async def change_checkpoint(
    context: Ctx,
    by: Operator,
    job: JobName,
    step: Step,
    action: Annotated[Action, Path(description="The action.")],
    wanted: CheckpointWanted,
) -> Decided:
    """Pin or unpin, quarantine or release, verify or delete.

    The last good checkpoint is never deleted.
    """
    await check_known(context, job)
    done = await do(context, by, "change", job, wanted, step=step, action=action)
    return done.model_copy(update={"action": action})


async def _list(context: Context, job: str, most: int, tier: str) -> Sequence[CheckpointPlace]:
    question = ListCheckpoints(job=job, most=most, tier=tier)
    reply = await ask(
        context.bus,
        "catalog",
        "list",
        question,
        CheckpointsLocated,
        see=f"ckpt ls {job}",
        within_s=2 * LOOK_WITHIN_S,
    )
    return reply.places


async def _on_record(context: Context, job: str, limit: int) -> list[Checkpoint]:
    """Checkpoints that were committed and not deleted, by the newest facts."""
    facts = tables.facts.c
    query = select(facts.n, facts.body).where(facts.job == job, facts.kind.in_(_ON_RECORD))
    newest = SortOrder((facts.n,), is_descending=True)
    listing = await page(context.database, query, newest, None, _MOST)
    committed: dict[str, CheckpointCommitted] = {}
    for row in reversed(listing.rows):
        fact = fact_in(row["body"])
        if isinstance(fact, CheckpointCommitted) and fact.tier == "global":
            committed[fact.path] = fact
        elif isinstance(fact, CheckpointDeleted):
            committed.pop(fact.path, None)
    newest_first = sorted(committed.values(), key=lambda fact: fact.step, reverse=True)
    return [_shown(_place(fact)) for fact in newest_first[:limit]]


def _place(fact: CheckpointCommitted) -> CheckpointPlace:
    fields = shared(CheckpointPlace, fact)
    return CheckpointPlace(**fields, saved_at=fact.at, committed_hash=fact.manifest_hash)


def _shown(place: CheckpointPlace) -> Checkpoint:
    shown = msgspec.structs.asdict(place)
    replicas = [
        {
            "slot": replica.slot,
            "holders": [msgspec.structs.asdict(peer) for peer in replica.holders],
        }
        for replica in place.replicas
    ]
    texts = ("path", "note", "manifest_hash", "committed_hash")
    more = {**{name: shown[name] or None for name in texts}, "replicas": replicas}
    return Checkpoint.model_validate({**shown, **more})
