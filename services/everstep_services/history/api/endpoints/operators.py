"""Requests of operators, forwarded to the services that carry them out and record them."""

from fastapi import APIRouter

from everstep_services.history.api.context import Ctx, Operator
from everstep_services.history.api.dto.operators import (
    CaptureWanted,
    ChecksWanted,
    Decided,
    DrainWanted,
    ExclusionWanted,
    InclusionWanted,
    MeasurementWanted,
    RestartWanted,
    SaveWanted,
    StopWanted,
)
from everstep_services.history.api.http.parameters import JobName, NodeName
from everstep_services.history.api.http.problems import ProblemError, responses
from everstep_services.history.api.service_calls import do, job_of
from everstep_services.history.node_names import unknown_nodes_text
from everstep_services.history.operator_requests import force_hint

router = APIRouter(tags=["operators"])


@router.post(
    "/jobs/{job}:stop", summary="Stop a job", status_code=202, responses=responses(404, 409)
)
async def stop_job(context: Ctx, by: Operator, job: JobName, wanted: StopWanted) -> Decided:
    """Its round ends, and its agents exit with 93. Answers when that is decided."""
    return await do(context, by, "stop", job, wanted)


@router.post(
    "/jobs/{job}:restart", summary="Restart a job", status_code=202, responses=responses(404, 409)
)
async def restart_job(context: Ctx, by: Operator, job: JobName, wanted: RestartWanted) -> Decided:
    """Its round ends, and another one follows. Costs nothing of the restart budget."""
    return await do(context, by, "restart", job, wanted)


@router.post(
    "/jobs/{job}:save", summary="Save a job", status_code=202, responses=responses(404, 409)
)
async def save_job(context: Ctx, by: Operator, job: JobName, wanted: SaveWanted) -> Decided:
    """Its ranks are asked to save at their next step, and go on."""
    return await do(context, by, "save", job, wanted)


@router.post(
    "/jobs/{job}:measure",
    summary="Measure the network of a job",
    status_code=202,
    responses=responses(404, 409),
)
async def measure_network(
    context: Ctx, by: Operator, job: JobName, wanted: MeasurementWanted
) -> Decided:
    """Its nodes measure in pairs, in turns: see facts of the kind `network_measured`."""
    return await do(context, by, "measure", job, wanted)


@router.post(
    "/jobs/{job}:capture",
    summary="Capture evidence of a job that runs",
    status_code=202,
    responses=responses(404, 409),
)
async def capture_evidence(
    context: Ctx, by: Operator, job: JobName, wanted: CaptureWanted
) -> Decided:
    """Its agents look at its ranks from outside, which go on.

    See facts of the kind `evidence_collected`, and `/incidents/{capture}/evidence/{evidence}`.
    """
    return await do(context, by, "capture", job, wanted)


@router.post(
    "/nodes/{node}:drain", summary="Drain a node", status_code=202, responses=responses(404, 409)
)
async def drain_node(context: Ctx, by: Operator, node: NodeName, wanted: DrainWanted) -> Decided:
    """It leaves the job that it takes part in; a spare takes its slot in the next round."""
    job = await job_of(context, node) if wanted.job is None else wanted.job
    return await do(context, by, "drain", job, wanted, node=node)


@router.post(
    "/nodes/{node}:exclude", summary="Exclude a node", status_code=202, responses=responses(409)
)
async def exclude_node(
    context: Ctx, by: Operator, node: NodeName, wanted: ExclusionWanted
) -> Decided:
    """It may join nothing until its time is over; a round that runs on it goes on.

    A node that is not on record is refused, unless `force` is true.
    """
    if not wanted.force and context.beats.node(node) is None:
        problem = await unknown_nodes_text(context.database, (node,), {})
        if problem is not None:
            raise ProblemError(422, "unknown_node", force_hint(problem))
    return await do(context, by, "exclude", None, wanted, node=node)


@router.post(
    "/nodes/{node}:include", summary="Include a node", status_code=202, responses=responses(409)
)
async def include_node(
    context: Ctx, by: Operator, node: NodeName, wanted: InclusionWanted
) -> Decided:
    """It may join again, no matter who excluded it."""
    return await do(context, by, "include", None, wanted, node=node)


@router.post(
    "/nodes/{node}:check", summary="Check a node", status_code=202, responses=responses(404, 409)
)
async def check_node(context: Ctx, by: Operator, node: NodeName, wanted: ChecksWanted) -> Decided:
    """Its agent examines it now, during the training: see `/nodes/{node}/checks`."""
    job = await job_of(context, node) if wanted.job is None else wanted.job
    return await do(context, by, "check", job, wanted, node=node)
