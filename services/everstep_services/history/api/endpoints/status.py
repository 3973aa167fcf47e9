"""`/status`: how far the record reaches, and the state of this replica."""

from itertools import islice
from typing import Any

from fastapi import APIRouter
from sqlalchemy import select

from everstep import __version__
from everstep.store import tables
from everstep.store.queries import first, log_head
from everstep.store.times import from_us
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.dto.service import BundleOut, Status, WrongClock
from everstep_services.history.api.http.problems import responses

router = APIRouter(tags=["status"])

_CLOCKS_MOST = 20


@router.get("/status", summary="The state of the record", responses=responses())
async def get_status(context: Ctx, _token: Reader) -> Status:
    """Works without the bus, too: the record is then as old as its last fact."""
    head = await log_head(context.database)
    newest = select(tables.positions).order_by(tables.positions.c.updated_us.desc())
    position: Any = await first(context.database, newest) or {}
    bundle = context.bundle
    read_us = position.get("updated_us")
    return Status(
        version=__version__,
        epoch=context.epoch,
        schema_version=context.schema,
        last_n=head.last_n,
        projected_n=head.projected_n,
        is_rebuilding=head.projected_n < head.last_n,
        stream=position.get("stream"),
        stream_sequence=position.get("sequence"),
        stream_read_at=None if read_us is None else from_us(read_us),
        is_projecting=context.connectedness.is_projecting(),
        is_bus_connected=context.connectedness.is_bus_connected(),
        database=context.database.kind,
        listeners=sum(context.feed.listeners.values()),
        wrong_clocks=[
            WrongClock(node=node, offset_s=round(offset_s, 3))
            for node, offset_s in islice(context.beats.wrong_clocks().items(), _CLOCKS_MOST)
        ],
        bundle=None if bundle is None else BundleOut.model_validate(bundle, from_attributes=True),
    )
