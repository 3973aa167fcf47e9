"""`/incidents` and `/actions`: what went wrong, why, and what was done about it."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Path, Query
from pydantic import Field
from sqlalchemy import ColumnElement, select

from everstep.messages.codec import fact_in
from everstep.messages.facts.ranks import RankExited
from everstep.store import tables
from everstep.store.incident_story import (
    IncidentStory,
    culprit_rank_nodes,
    incident_story,
    jobs_of_incident,
)
from everstep.store.queries import Record, SortOrder, incident_fate, is_culprit, shown_incidents
from everstep.store.times import to_us
from everstep_services.history.api.context import Context, Ctx, Operator, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.incidents import (
    Action,
    CorrectionOut,
    EvidenceCoverageOut,
    EvidenceOut,
    Incident,
    IncidentDetail,
    LedgerOut,
    Located,
    Primary,
    SimilarIncident,
    headlines,
    shown_evidence,
    shown_verdict,
)
from everstep_services.history.api.dto.jobs import Round, Stall, shown_exit, shown_round
from everstep_services.history.api.dto.numerics import shown_case
from everstep_services.history.api.dto.operators import CorrectionWanted, Decided
from everstep_services.history.api.dto.stragglers import shown_slow_rank
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import (
    NAME,
    TEXT,
    Flag,
    JobName,
    Moment,
    Whole,
    Word,
    check_window,
)
from everstep_services.history.api.http.problems import ProblemError, not_found, responses
from everstep_services.history.api.service_calls import do
from everstep_services.history.evidence_coverage import Coverage, coverage

router = APIRouter(tags=["incidents"])


class IncidentFilter(Paging):
    """Filters of the incidents of a job."""

    open: Flag | None = None
    """True for open incidents only, false for closed ones only."""
    outcome: list[Word] | None = Field(None, max_length=10, examples=[["failed"]])
    """Only with one of these outcomes."""
    trigger: str | None = Field(None, max_length=64, pattern=TEXT)
    """Only with a first report of this kind."""
    node: str | None = Field(None, pattern=NAME)
    """Only incidents whose first report, or whose verdict, names this node."""
    round: Whole | None = Field(None, description="Only incidents that broke this round.")
    since: Moment | None = None
    """Only incidents that opened at or after this moment, by the sender's clock."""
    until: Moment | None = Field(None, description="Only incidents that opened before this moment.")
    order: Literal["asc", "desc"] = "desc"
    """The order of their arrival in the record."""


class AnyIncidentFilter(IncidentFilter):
    """Filters of the incidents of all jobs."""

    job: str | None = Field(None, pattern=NAME, description="Only of this job.")


class ActionFilter(Paging):
    """Filters of the decisions about a job."""

    action: list[Word] | None = Field(None, max_length=10, examples=[["restart", "stop"]])
    """Only these actions."""
    mode: Literal["enforce", "observe"] | None = None
    """`enforce` for decisions that were carried out, `observe` for those that were only
    recorded."""
    order: Literal["asc", "desc"] = "desc"
    """The order of their places in the log."""


IncidentId = Annotated[str, Path(pattern=NAME, description="The incident's id.")]


@router.get("/incidents", summary="Incidents of all jobs", responses=responses())
async def list_all_incidents(
    context: Ctx, _token: Reader, asked: Annotated[AnyIncidentFilter, Query()]
) -> PageOf[Incident]:
    """Incidents, the newest first."""
    return await _incidents(context, asked, asked.job, "/incidents")


@router.get(
    "/incidents/{incident}", summary="Why it happened, by its id", responses=responses(404, 409)
)
async def get_any_incident(context: Ctx, _token: Reader, incident: IncidentId) -> IncidentDetail:
    """The whole story of an incident, the same as at the path of its job."""
    return await _told(context, await job_of_incident(context, incident), incident)


@router.post(
    "/incidents/{incident}/correction",
    summary="Correct a verdict",
    status_code=202,
    responses=responses(404, 409),
)
async def correct_incident(
    context: Ctx, by: Operator, incident: IncidentId, wanted: CorrectionWanted
) -> Decided:
    """Record who or what caused the incident. No later evidence changes a correction."""
    job = await job_of_incident(context, incident)
    return await do(context, by, "correct", job, wanted, incident=incident)


@router.get("/jobs/{job}/incidents", summary="A job's incidents", responses=responses(404))
async def list_incidents(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[IncidentFilter, Query()]
) -> PageOf[Incident]:
    """Incidents of one job, the newest first."""
    await check_known(context, job)
    return await _incidents(context, asked, job, f"/jobs/{job}/incidents")


@router.get("/jobs/{job}/incidents/{incident}", summary="Why it happened", responses=responses(404))
async def get_incident(
    context: Ctx, _token: Reader, job: JobName, incident: IncidentId
) -> IncidentDetail:
    """The whole story of an incident in one answer.

    Who failed and how, on which evidence, what was decided by which rule and what else was
    considered, who came and went, and where the time went.
    """
    return await _told(context, job, incident)


@router.get("/jobs/{job}/actions", summary="A job's decisions", responses=responses(404))
async def list_actions(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[ActionFilter, Query()]
) -> PageOf[Action]:
    """Decisions about a job, with their rule and their outcome; the newest first."""
    await check_known(context, job)
    actions = tables.actions
    query = select(actions).where(actions.c.job == job)
    if asked.action:
        query = query.where(actions.c.action.in_(asked.action))
    if asked.mode is not None:
        query = query.where(actions.c.mode == asked.mode)
    order = SortOrder((actions.c.n,), is_descending=asked.order == "desc")
    listing = await paged(context, query, order, asked, f"/jobs/{job}/actions")
    return PageOf[Action](items=[Action(**present(row)) for row in listing.rows], next=listing.next)


async def job_of_incident(context: Context, incident: str) -> str:
    """The job that this incident belongs to."""
    jobs = await jobs_of_incident(context.database, incident)
    if not jobs:
        raise not_found(f"incident {incident}")
    if len(jobs) > 1:
        detail = (
            f"{len(jobs)} jobs have an incident {incident}: ask for "
            f"/jobs/{jobs[0]}/incidents/{incident}, or that of {', '.join(jobs[1:10])}"
        )
        raise ProblemError(409, "several_jobs", detail)
    return jobs[0]


async def _told(context: Context, job: str, incident: str) -> IncidentDetail:
    story = await incident_story(context.database, job, incident)
    if story is None:
        raise not_found(f"incident {incident} of job {job}")
    keeps_s = await context.retention.keeps_s()
    blobs = [msgspec.json.decode(item["blob"]) for item in story.evidence if item["blob"]]
    copied = await context.kept.copied({blob["id"] for blob in blobs})
    now = context.clock.wall()
    nodes = await culprit_rank_nodes(context.database, [story.incident])
    return _detail(story, nodes, shown_evidence(story.evidence, copied, keeps_s, now))


async def _incidents(
    context: Context, asked: IncidentFilter, job: str | None, path: str
) -> PageOf[Incident]:
    check_window(asked.since, asked.until, context.clock.wall())
    incidents = tables.incidents
    query = shown_incidents().where(*_conditions(asked))
    if job is not None:
        query = query.where(incidents.c.job == job)
    order = SortOrder((incidents.c.first_n,), is_descending=asked.order == "desc")
    listing = await paged(context, query, order, asked, path)
    nodes = await culprit_rank_nodes(context.database, listing.rows)
    items = [Incident(**_incident(row, nodes)) for row in listing.rows]
    return PageOf[Incident](items=items, next=listing.next)


def _conditions(asked: IncidentFilter) -> list[ColumnElement[bool]]:
    here = tables.incidents.c
    conditions: list[ColumnElement[bool]] = [
        column == value
        for column, value in ((here.trigger, asked.trigger), (here.round, asked.round))
        if value is not None
    ]
    if asked.node is not None:
        conditions.append((here.node == asked.node) | is_culprit(asked.node))
    if asked.open is not None:
        conditions.append(
            here.closed_fact.is_(None) if asked.open else here.closed_fact.is_not(None)
        )
    if asked.outcome:
        conditions.append(incident_fate().in_(asked.outcome))
    if asked.since is not None:
        conditions.append(here.opened_us >= to_us(asked.since))
    if asked.until is not None:
        conditions.append(here.opened_us < to_us(asked.until))
    return conditions


_Nodes = Mapping[tuple[str, str], list[str]]


def _incident(row: Record, nodes: _Nodes) -> dict[str, Any]:
    shown = present(row)
    ledger = None if row["closed_fact"] is None else LedgerOut(**shown)
    own = nodes.get((row["job"], row["incident"]), [])
    return {**shown, **headlines(shown), "ledger": ledger, "culprit_rank_nodes": own}


def _detail(story: IncidentStory, nodes: _Nodes, evidence: list[EvidenceOut]) -> IncidentDetail:
    row = story.incident
    verdicts = [shown_verdict(verdict) for verdict in story.verdicts]
    return IncidentDetail(
        **_incident(row, nodes),
        primary=_primary(story),
        stall=None if story.stall is None else Stall(**present(story.stall)),
        stalls=[Stall(**present(stall)) for stall in story.stalls],
        located=None if story.located is None else Located(**present(story.located)),
        numerics=None
        if story.numerics is None
        else shown_case(story.numerics, story.numerics_acts),
        slow_ranks=[shown_slow_rank(slow_rank) for slow_rank in story.slow_ranks],
        verdict=next(
            (verdict for verdict in verdicts if verdict.verdict_fact == row["verdict_fact"]), None
        ),
        revisions=[verdict for verdict in verdicts if verdict.verdict_fact != row["verdict_fact"]],
        corrections=[CorrectionOut(**present(correction)) for correction in story.corrections],
        similar=[SimilarIncident(**_incident(item, {})) for item in story.similar],
        exits=[shown_exit(exit) for exit in story.exits],
        evidence=evidence,
        evidence_coverage=[EvidenceCoverageOut(**asdict(kind)) for kind in _coverage(story)],
        actions=[Action(**present(action)) for action in story.actions],
        rounds=[Round(**shown_round(round)) for round in story.rounds],
        nodes_out=list(story.nodes_out),
        nodes_in=list(story.nodes_in),
    )


def _coverage(story: IncidentStory) -> list[Coverage]:
    """What there was of each kind of evidence; a person's verdict rests on none."""
    row = story.incident
    rows = [verdict for verdict in story.verdicts if verdict["verdict_fact"] == row["verdict_fact"]]
    verdicts = [verdict for verdict in map(shown_verdict, rows) if not verdict.is_corrected]
    if not verdicts:
        return []
    others = [other.cause for other in verdicts[0].alternatives or ()]
    pieces = [(piece["kind"], piece["missing_reason"]) for piece in story.evidence]
    exits = [*story.exits, *([] if story.primary is None else [story.primary])]
    recorded = {"exception"} if any(exit["error_name"] for exit in exits) else set()
    causes = [cause for cause in (verdicts[0].cause, *others) if cause]
    return coverage(pieces, causes, recorded, verdicts[0].missing or ())


def _primary(story: IncidentStory) -> Primary | None:
    if story.primary is None:
        return None
    shown = shown_exit(story.primary).model_dump()
    return Primary(**{**shown, "traceback": _traceback(story) or shown["traceback"]})


def _traceback(story: IncidentStory) -> str | None:
    """The primary exit, complete, from its fact."""
    if story.primary_body is None:
        return None
    fact = fact_in(story.primary_body)
    return fact.error.traceback if isinstance(fact, RankExited) and fact.error else None
