"""`/control` and `/brake`: switches at run time. Health changes them; all services follow."""

from typing import Annotated, TypeVar

from fastapi import APIRouter, Query
from pydantic import Field

from everstep.bus.errors import BusError
from everstep.messages import ControlDocument, NodesDocument, ShowSwitches, SwitchTable
from everstep.messages.base import DocumentBody
from everstep.messages.codec import BadMessageError, decode_as
from everstep.subjects import CLUSTER
from everstep_services.history.api.context import Context, Ctx, Operator, Reader
from everstep_services.history.api.dto.health import (
    Control,
    ExclusionOut,
    Switches,
    SwitchesInForce,
    SwitchInForce,
)
from everstep_services.history.api.dto.operators import BrakeWanted, ControlWanted, Decided
from everstep_services.history.api.http.parameters import NAME, RequestModel
from everstep_services.history.api.http.problems import responses
from everstep_services.history.api.service_calls import do, problems_of, unavailable
from everstep_services.history.operator_requests import ask

D = TypeVar("D", bound=DocumentBody)

router = APIRouter(tags=["operators"])

_JOBS_MOST = 100


@router.get("/control", summary="List switches", responses=responses())
async def get_control(context: Ctx, _token: Reader) -> Control:
    """Brake, modes, settings and exclusions, as the bus holds them at this moment."""
    try:
        keys = [key for key in await context.bus.documents("CONTROL").keys() if key != CLUSTER]
        nodes, _ = await _read(context, "NODES", CLUSTER, NodesDocument)
        return Control(
            cluster=await _switches(context, None),
            jobs=[await _switches(context, key) for key in sorted(keys)[:_JOBS_MOST]],
            breaker_opened_at=None if nodes is None else nodes.breaker_opened_at,
            distrusted_checks=[] if nodes is None else list(nodes.distrusted),
        )
    except BusError as error:
        raise unavailable("bus", error) from error


class AboutJob(RequestModel):
    """The job."""

    job: str | None = Field(None, pattern=NAME)
    """The switches for this job; by default those for all jobs."""


@router.get(
    "/control/straggler", summary="Switches of slow ranks in force", responses=responses(422)
)
async def get_straggler_switches(
    context: Ctx, _token: Reader, asked: Annotated[AboutJob, Query()]
) -> SwitchesInForce:
    """The switches of straggler detection: each with its value and the origin of the value."""
    question = ShowSwitches(job=asked.job or CLUSTER)
    with problems_of("straggler"):
        table = await ask(
            context.bus, "straggler", "switches", question, SwitchTable, see="control show"
        )
    return SwitchesInForce(
        job=asked.job,
        switches=[
            SwitchInForce(name=switch.name, value=switch.value, source=switch.source)
            for switch in table.switches
        ],
    )


@router.post("/control", summary="Change switches", status_code=202, responses=responses(404, 409))
async def change_control(context: Ctx, by: Operator, wanted: ControlWanted) -> Decided:
    """Change switches by dotted name, as `brake`, `modes.exclude` or `breaker`.

    No restart is needed.
    """
    return await do(context, by, "control", wanted.job, wanted)


@router.post("/brake", summary="Pull the brake", status_code=202, responses=responses(404, 409))
async def set_brake(context: Ctx, by: Operator, wanted: BrakeWanted) -> Decided:
    """With the brake on, Everstep harms no training that runs.

    It ends no round in which all ranks live, and stops, excludes and deletes nothing: it records
    what it would do. A round that has failed is still restarted, within the job's budget: a rank
    exited, or the connection of a node's agent stays closed for 10 s. A silent node ends no round.
    """
    changes = {"brake": "on" if wanted.is_on else "off"}
    told = ControlWanted(changes=changes, job=wanted.job, reason=wanted.reason, user=wanted.user)
    return await do(context, by, "control", wanted.job, told)


async def _switches(context: Context, job: str | None) -> Switches:
    stored, revision = await _read(context, "CONTROL", job or CLUSTER, ControlDocument)
    document = stored or ControlDocument(settings={}, modes={}, changed_by="", reason="")
    return Switches(
        job=job,
        is_braked=document.is_braked,
        braked_by=document.braked_by or None,
        brake_reason=document.brake_reason or None,
        modes=dict(document.modes),
        settings=dict(document.settings),
        exclusions=[
            ExclusionOut(
                node=exclusion.node,
                by=exclusion.by,
                reason=exclusion.reason,
                until_at=exclusion.until,
            )
            for exclusion in document.exclusions
        ],
        changed_by=document.changed_by or None,
        reason=document.reason or None,
        revision=revision,
    )


async def _read(context: Context, bucket: str, key: str, of: type[D]) -> tuple[D | None, int]:
    """The document and its revision; None when there is no readable document."""
    document = await context.bus.documents(bucket).get(key)
    if document.data is None:
        return None, 0
    try:
        return decode_as(document.data, of), document.revision
    except BadMessageError:
        return None, document.revision
