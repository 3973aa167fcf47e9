"""`/jobs/{job}/limits`: the limits past which ranks count as stalled, and changes of them."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query
from msgspec.structs import replace
from sqlalchemy import select

from everstep.bus.errors import BusDeniedError
from everstep.messages import LimitsDocument, SectionLimit, ShowLimits
from everstep.store import tables
from everstep.store.queries import Record, first
from everstep_services.history.api.context import Context, Ctx, Operator, Reader
from everstep_services.history.api.dto.answer import present
from everstep_services.history.api.dto.health import LimitOut, Limits
from everstep_services.history.api.dto.operators import Decided, LimitWanted, RequestBody
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.parameters import TEXT, JobName
from everstep_services.history.api.http.problems import responses
from everstep_services.history.api.service_calls import do
from everstep_services.history.operator_requests import (
    LOOK_WITHIN_S,
    RequestError,
    ServiceUnavailableError,
    ask,
)

router = APIRouter(tags=["jobs"])

FIRST_STEP = "first-step"
OUTSIDE = "outside"
"""The name for people of the time outside all sections; on the bus its name is empty."""
_NONE_YET = "nothing was learned or set yet: agents use their defaults"
_NO_RANKS = (
    "no agent tells its limits now; these were learned or set, and what an agent is started with "
    "wins over what was learned"
)

Section = Annotated[
    str,
    Path(
        min_length=1,
        max_length=64,
        pattern=TEXT,
        description="The section; `outside` for the time outside all sections, `first-step` for "
        "the first step.",
        examples=["checkpoint"],
    ),
]


@router.get("/jobs/{job}/limits", summary="A job's limits", responses=responses(404))
async def get_limits(context: Ctx, _token: Reader, job: JobName) -> Limits:
    """The limits that health has learned or that a person has set, with the numbers behind each."""
    await check_known(context, job)
    try:
        show = ShowLimits(job=job)
        document = await ask(
            context.bus,
            "health",
            "limits",
            show,
            LimitsDocument,
            see=f"limits {job}",
            within_s=LOOK_WITHIN_S,
        )
    except (ServiceUnavailableError, BusDeniedError) as error:
        if acting := context.beats.limits(job):
            unlearned = LimitsDocument(job=job, limits=(), first_step_limit_s=0.0, reason="")
            return _live(unlearned, [*_acting(acting, unlearned)], str(error))
        return await _on_record(context, job, f"{error}; these are the last that are on record")
    except RequestError:  # health knows of none
        return await _on_record(context, job, _NONE_YET)
    if acting := context.beats.limits(job):
        return _live(document, [*_acting(acting, document)], None)
    is_empty = not document.limits and document.first_step_longest_s is None
    return _live(document, [*_of_document(document)], _NONE_YET if is_empty else _NO_RANKS)


def _live(document: LimitsDocument, limits: list[LimitOut], note: str | None) -> Limits:
    return Limits(
        job=document.job,
        limits=limits,
        rule=document.reason or None,
        round=document.round,
        config_fingerprint=document.config_fingerprint or None,
        is_live=True,
        at=None,
        note=note,
    )


@router.put(
    "/jobs/{job}/limits/{section:path}",
    summary="Set a limit",
    status_code=202,
    responses=responses(404, 409),
)
async def set_limit(
    context: Ctx, by: Operator, job: JobName, section: Section, wanted: LimitWanted
) -> Decided:
    """The limit applies from now on, and overrides the learned limit until it is deleted."""
    return await do(context, by, "set_limit", job, wanted, section=_on_the_bus(section))


@router.delete(
    "/jobs/{job}/limits/{section:path}",
    summary="Return to a learned limit",
    status_code=202,
    responses=responses(404, 409),
)
async def delete_limit(
    context: Ctx,
    by: Operator,
    job: JobName,
    section: Section,
    wanted: Annotated[RequestBody, Query()],
) -> Decided:
    """Delete a limit that was set; the learned limit applies again, otherwise the default."""
    name = _on_the_bus(section)
    return await do(context, by, "set_limit", job, wanted, section=name, limit_s=0.0)


def _on_the_bus(section: str) -> str:
    return "" if section == OUTSIDE else section


def _acting(limits: Iterable[SectionLimit], document: LimitsDocument) -> Iterator[LimitOut]:
    """The limits that agents report as in force, with the numbers that health has for them."""
    learned = {limit.section: limit for limit in document.limits}
    for item in limits:
        if item.section == FIRST_STEP and item.source == "learned":
            yield _first_step(document)
            continue
        learned_limit = learned.get(item.section)
        if learned_limit is None:
            yield _shown(item)
        else:
            numbers = {
                "longest_s": learned_limit.longest_s,
                "observations": learned_limit.observations,
            }
            yield _shown(replace(item, **numbers))


def _of_document(document: LimitsDocument) -> Iterator[LimitOut]:
    named = [limit.section for limit in document.limits]
    if FIRST_STEP not in named and document.first_step_longest_s is not None:
        yield _first_step(document)
    for item in document.limits:
        yield _shown(item)


def _first_step(document: LimitsDocument) -> LimitOut:
    longest_s = document.first_step_longest_s
    took = "" if longest_s is None else f" took {longest_s:.3g} s"
    return LimitOut(
        section=FIRST_STEP,
        limit_s=document.first_step_limit_s,
        source="learned",
        why=f"the longest first step{took}",
        longest_s=longest_s,
        observations=0,
        kind=None,
    )


async def _on_record(context: Context, job: str, note: str) -> Limits:
    row: Record | None = await first(
        context.database, select(tables.job_limits).where(tables.job_limits.c.job == job)
    )
    record: dict[str, Any] = {} if row is None else present(row)
    return Limits(
        job=job,
        limits=[_shown(SectionLimit(**limit)) for limit in record.get("limits") or ()],
        rule=record.get("limits_reason"),
        round=None,
        config_fingerprint=None,
        is_live=False,
        at=record.get("limits_at"),
        note=note,
    )


def _shown(limit: SectionLimit) -> LimitOut:
    names = {"section": limit.section or OUTSIDE}
    texts = {"kind": limit.kind or None, "origin": limit.origin or None}
    return LimitOut(**{**msgspec.structs.asdict(limit), **names, **texts}, why=_why(limit))


def _why(limit: SectionLimit) -> str:
    longest_s = limit.longest_s
    if limit.source == "default":
        seen = "" if longest_s is None else f"; the longest on any rank took {longest_s:.3g} s"
        return ", ".join(filter(None, ("nothing was learned yet", limit.origin))) + seen
    if longest_s is None:
        seen = "it was never seen to end"
    else:
        times = f"{limit.observations} time{'' if limit.observations == 1 else 's'}"
        seen = f"the longest on any rank took {longest_s:.3g} s, seen {times}"
    match limit.source:
        case "configured":
            return f"set by {limit.origin or 'an operator'}; {seen}"
        case "learned" if longest_s:
            return f"{limit.limit_s / longest_s:.3g} times the longest: {seen}"
        case "floor":
            return f"the least that a limit may be: {seen}"
        case "cap":
            return f"the most that a limit may be: {seen}"
        case _:
            return seen
