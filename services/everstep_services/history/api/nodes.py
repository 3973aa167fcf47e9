"""`/nodes`: hosts, whether they are there, and whether they can be trusted."""

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from pydantic import Field
from sqlalchemy import ColumnElement, func, or_, select

from everstep.store import tables
from everstep.store.instants import to_us
from everstep.store.reads import Order, first, holds
from everstep_services.history.api.context import Ctx, Paging, Reader
from everstep_services.history.api.dto import Node, PageOf, present
from everstep_services.history.api.jobs import NAME, TEXT, paged
from everstep_services.history.api.problems import not_found, responses

router = APIRouter(tags=["nodes"])


class NodeFilter(Paging):
    """Which nodes."""

    job: str | None = Field(None, pattern=NAME, description="The job that it joined last.")
    state: Literal["joined", "left", "lost"] | None = Field(None, description="As last heard.")
    healthy: bool | None = Field(None, description="By its last check.")
    suspect: bool | None = Field(None, description="Somebody has evidence against it.")
    excluded: bool | None = Field(None, description="Now: its time is not over.")
    q: str | None = Field(
        None, max_length=128, pattern=TEXT, description="Part of the id or address, in any case."
    )
    order: Literal["asc", "desc"] = Field("asc", description="By id.")


@router.get("/nodes", summary="List nodes", responses=responses())
async def list_nodes(
    context: Ctx, _token: Reader, asked: Annotated[NodeFilter, Query()]
) -> PageOf[Node]:
    """Nodes of all jobs, by id."""
    now_us = to_us(context.clock.wall())
    query = select(tables.nodes).where(*_conditions(asked, now_us))
    order = Order((tables.nodes.c.node,), is_descending=asked.order == "desc")
    found = await paged(context, query, order, asked, "/nodes")
    return PageOf[Node](items=[Node(**present(row)) for row in found.rows], next=found.next)


@router.get("/nodes/{node}", summary="One node", responses=responses(404))
async def get_node(
    context: Ctx,
    _token: Reader,
    node: Annotated[str, Path(pattern=NAME, description="The node's id.", examples=["node-07"])],
) -> Node:
    """A node. Its history is `/facts?node=…`."""
    row = await first(context.database, select(tables.nodes).where(tables.nodes.c.node == node))
    if row is None:
        raise not_found(f"node {node}")
    return Node(**present(row))


def _conditions(asked: NodeFilter, now_us: int) -> list[ColumnElement[bool]]:
    nodes = tables.nodes.c
    conditions: list[ColumnElement[bool]] = []
    if asked.job is not None:
        conditions.append(nodes.job == asked.job)
    if asked.state is not None:
        conditions.append(nodes.state == asked.state)
    if asked.healthy is not None:
        conditions.append(nodes.is_healthy.is_(asked.healthy))
    if asked.suspect is not None:
        conditions.append(func.coalesce(nodes.is_suspect, False).is_(asked.suspect))
    if asked.excluded is not None:
        until = nodes.excluded_until_us
        excluded = func.coalesce(nodes.is_excluded, False).is_(True) & or_(
            until.is_(None), until > now_us
        )
        conditions.append(excluded if asked.excluded else ~excluded)
    if asked.q is not None:
        conditions.append(holds(nodes.node, asked.q) | holds(nodes.address, asked.q))
    return conditions
