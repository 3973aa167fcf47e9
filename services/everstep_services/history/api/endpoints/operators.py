"""Requests of operators: the services that carry them out record them; and test messages."""

import logging
from functools import partial

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
    NotificationTest,
    NotificationTestWanted,
    RestartWanted,
    SaveWanted,
    StopWanted,
    TargetAnswered,
)
from everstep_services.history.api.http.parameters import JobName, NodeName
from everstep_services.history.api.http.problems import ProblemError, responses
from everstep_services.history.api.service_calls import do, job_of
from everstep_services.history.node_names import unknown_nodes_text
from everstep_services.history.operator_requests import force_hint

log = logging.getLogger(__name__)
router = APIRouter(tags=["operators"])

_post = partial(router.post, status_code=202, responses=responses(404, 409))


@_post("/jobs/{job}:stop", summary="Stop a job")
async def stop_job(context: Ctx, by: Operator, job: JobName, wanted: StopWanted) -> Decided:
    """The job's round ends, and its agents exit with 93. The answer comes once this is decided."""
    return await do(context, by, "stop", job, wanted)


@_post("/jobs/{job}:restart", summary="Restart a job")
async def restart_job(context: Ctx, by: Operator, job: JobName, wanted: RestartWanted) -> Decided:
    """The job's round ends, and another one follows.

    The restart does not count against the budget.
    """
    return await do(context, by, "restart", job, wanted)


@_post("/jobs/{job}:save", summary="Save a job")
async def save_job(context: Ctx, by: Operator, job: JobName, wanted: SaveWanted) -> Decided:
    """The job's ranks are asked to save at their next step, and continue."""
    return await do(context, by, "save", job, wanted)


@_post("/jobs/{job}:measure", summary="Measure the network of a job")
async def measure_network(
    context: Ctx, by: Operator, job: JobName, wanted: MeasurementWanted
) -> Decided:
    """The job's nodes measure in pairs, in turns: see facts of the kind `network_measured`."""
    return await do(context, by, "measure", job, wanted)


@_post("/jobs/{job}:capture", summary="Capture evidence of a running job")
async def capture_evidence(
    context: Ctx, by: Operator, job: JobName, wanted: CaptureWanted
) -> Decided:
    """The job's agents collect evidence about its ranks, which continue to run.

    See facts of the kind `evidence_collected`, and `/incidents/{capture}/evidence/{evidence}`.
    """
    return await do(context, by, "capture", job, wanted)


@_post("/nodes/{node}:drain", summary="Drain a node")
async def drain_node(context: Ctx, by: Operator, node: NodeName, wanted: DrainWanted) -> Decided:
    """The node leaves the job that it takes part in; a spare takes its slot in the next round."""
    job = await job_of(context, node) if wanted.job is None else wanted.job
    return await do(context, by, "drain", job, wanted, node=node)


@router.post(
    "/nodes/{node}:exclude", summary="Exclude a node", status_code=202, responses=responses(409)
)
async def exclude_node(
    context: Ctx, by: Operator, node: NodeName, wanted: ExclusionWanted
) -> Decided:
    """The node may join no round until the exclusion ends; a round that runs on it continues.

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
    """The node may join again, no matter who excluded it."""
    return await do(context, by, "include", None, wanted, node=node)


@_post("/nodes/{node}:check", summary="Check a node")
async def check_node(context: Ctx, by: Operator, node: NodeName, wanted: ChecksWanted) -> Decided:
    """The node's agent examines it now, during the training: see `/nodes/{node}/checks`."""
    job = await job_of(context, node) if wanted.job is None else wanted.job
    return await do(context, by, "check", job, wanted, node=node)


@router.post("/notifications/test", summary="Send a test message", responses=responses(409))
async def test_notifications(
    context: Ctx, by: Operator, wanted: NotificationTestWanted
) -> NotificationTest:
    """Send a test message to the targets that are set in `[notify]`, and say what they answer."""
    log.info("notifications_tested target=%s token=%s", wanted.target or "all", by.id)
    targets = None if wanted.target is None else (wanted.target,)
    answers = await context.notifications.test(targets)
    if not answers:
        target = "a target" if wanted.target is None else wanted.target
        raise ProblemError(
            409, "not_set", f"{target} is not set in [notify]: see the guide on notifications"
        )
    return NotificationTest(
        targets=[
            TargetAnswered(target=answer.target, is_taken=answer.is_taken, text=answer.text)
            for answer in answers
        ]
    )
