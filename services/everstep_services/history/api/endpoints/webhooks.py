"""`/webhooks`: notices of maintenance from outside, signed by their senders."""

from dataclasses import dataclass
from typing import Annotated, Literal

from fastapi import APIRouter, Body, Depends, Path, Query, Request
from pydantic import Field
from sqlalchemy import select

from everstep.store import tables
from everstep.store.maintenance import ALL_NODES, notice_of
from everstep.store.queries import SortOrder
from everstep.store.times import to_us
from everstep_services.history.api.context import Context, Ctx, Operator, Reader, Sender
from everstep_services.history.api.dto.answer import PageOf
from everstep_services.history.api.dto.webhooks import (
    MaintenanceCancelled,
    MaintenanceOut,
    WebhookTaken,
    shown,
)
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import NAME, TEXT
from everstep_services.history.api.http.problems import ProblemError, not_found, responses
from everstep_services.history.webhooks.shapes import (
    HealthEvents,
    MaintenanceWanted,
    Reading,
    ScheduledEvents,
)

router = APIRouter(tags=["webhooks"])
_SIGNED = (
    "The body is signed with the sender's key: `Everstep-Timestamp` and `Everstep-Signature`, as "
    "in our own webhooks."
)
_BODY_MOST = 256 << 10


@dataclass(frozen=True, slots=True)
class SignedMessage:
    """The sender of a message, and when it was signed."""

    sender: str
    sent_s: int


async def _signed(context: Ctx, by: Sender, request: Request) -> SignedMessage:
    body = await request.body()
    if len(body) > _BODY_MOST:
        detail = f"the body has {len(body)} bytes, {_BODY_MOST} is the limit"
        raise ProblemError(413, "body_too_large", detail)
    return SignedMessage(by.name, await context.maintenance.senders.check(
        by.name, request.headers, body))  # fmt: skip


Signed = Annotated[SignedMessage, Depends(_signed)]


class MaintenanceFilter(Paging):
    """Filters of the list of notices."""

    sender: str | None = Field(None, max_length=128, pattern=TEXT)
    """Only of this sender."""
    node: str | None = Field(None, pattern=NAME, description="Only about this node.")
    state: Literal["waiting", "done", "observed", "refused", "failed", "cancelled"] | None = None
    """Only in this state."""


@router.post(
    "/webhooks/maintenance",
    summary="Announce maintenance",
    status_code=202,
    description=f"Drain or exclude nodes now or at a moment, or cancel that. {_SIGNED}",
    responses=responses(409),
)
async def announce_maintenance(
    context: Ctx, by: Sender, signed: Signed, wanted: MaintenanceWanted
) -> WebhookTaken:
    """Our own shape."""
    del by
    try:
        reading = wanted.reading()
    except ValueError as error:
        raise ProblemError(422, "invalid_request", f"body: {error}") from error
    return await _take(context, signed, reading, lead_s=0.0)


@router.post(
    "/webhooks/health-events",
    summary="Take health events",
    status_code=202,
    description="Drain nodes with fatal health events, in the shape that NVSentinel documents. "
    f"{_SIGNED}",
    responses=responses(409),
)
async def take_health_events(
    context: Ctx, by: Sender, signed: Signed, events: HealthEvents
) -> WebhookTaken:
    """NVSentinel's shape."""
    del by
    return await _take(context, signed, events.reading(), lead_s=0.0)


@router.post(
    "/webhooks/scheduled-events",
    summary="Take scheduled events of a cloud",
    status_code=202,
    description="Drain nodes before their machines are taken away, in the shape that Azure "
    f"documents for Scheduled Events. {_SIGNED}",
    responses=responses(409),
)
async def take_scheduled_events(
    context: Ctx, by: Sender, signed: Signed, events: ScheduledEvents
) -> WebhookTaken:
    """Azure's shape."""
    del by
    try:
        reading = events.reading()
    except (ValueError, TypeError) as error:
        raise ProblemError(422, "invalid_request", f"NotBefore: {error}"[:300]) from error
    lead_s = context.settings.webhooks.lead_s
    return await _take(context, signed, reading, lead_s=lead_s)


@router.get("/webhooks/notices", summary="List notices of maintenance", responses=responses())
async def list_maintenance(
    context: Ctx, _token: Reader, asked: Annotated[MaintenanceFilter, Query()]
) -> PageOf[MaintenanceOut]:
    """What senders have announced, by sender, id and node."""
    table = tables.maintenance.c
    wanted = {table.sender: asked.sender, table.node: asked.node, table.state: asked.state}
    conditions = [column == value for column, value in wanted.items() if value is not None]
    query = select(tables.maintenance).where(table.node != ALL_NODES, *conditions)
    order = SortOrder((table.sender, table.id, table.node))
    listing = await paged(context, query, order, asked, "/webhooks/notices")
    return PageOf(items=[shown(notice_of(row)) for row in listing.rows], next=listing.next)


@router.post(
    "/webhooks/notices/{id}:cancel",
    summary="Cancel a notice of maintenance",
    status_code=202,
    responses=responses(404, 409),
)
async def cancel_maintenance(
    context: Ctx,
    by: Operator,
    id_: Annotated[
        str, Path(alias="id", max_length=128, pattern=TEXT, description="The id of the notice.")
    ],
    wanted: Annotated[MaintenanceCancelled, Body()],
) -> WebhookTaken:
    """Nothing more is done because of the notice; what was done is not undone."""
    outcome = f"cancelled by {by.name}: {wanted.reason}"
    notices, cancelled = await context.maintenance.notices.cancel(
        None, id_, at_us=to_us(context.clock.wall()), outcome=outcome
    )
    if not notices:
        raise not_found(f"notice {id_[:128]!r}")
    if not cancelled:
        detail = f"it does not wait: it is {notices[0].state} ({notices[0].outcome[:200]})"
        raise ProblemError(409, "not_waiting", detail)
    return WebhookTaken(notices=[shown(notice) for notice in notices], stale=0, ignored=[])


async def _take(
    context: Context, signed: SignedMessage, reading: Reading, *, lead_s: float
) -> WebhookTaken:
    received = await context.maintenance.receive(signed.sender, signed.sent_s, reading, lead_s)
    return WebhookTaken(
        notices=[shown(change.notice) for change in received.changes],
        stale=sum(change.is_stale for change in received.changes),
        ignored=list(received.ignored),
    )
