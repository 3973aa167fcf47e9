"""`/nodes`: nodes, their presence, their health, and the results of their checks."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import ColumnElement, case, func, or_, select

from everstep.bus.errors import BusDeniedError
from everstep.job_states import NodePresence
from everstep.messages import NodeStanding, NodeStandings, ShowNodes
from everstep.store import tables
from everstep.store.queries import Record, SortOrder, first, holds, node_state, nodes_with_state
from everstep.store.times import to_us
from everstep.subjects import CLUSTER
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.nodes import (
    CheckOut,
    Examination,
    Node,
    NodeDetail,
    NodeNow,
    ProbeNow,
    Standing,
)
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import NAME, TEXT, Flag, NodeName
from everstep_services.history.api.http.problems import not_found, responses
from everstep_services.history.beats import HeardBeat
from everstep_services.history.node_names import similar_nodes
from everstep_services.history.operator_requests import LOOK_WITHIN_S, RequestError, ask

router = APIRouter(tags=["nodes"])

_STRUCK_MOST = 1000


class NodeFilter(Paging):
    """Filters of the list of nodes."""

    job: str | None = Field(None, pattern=NAME, description="Only nodes that joined this job last.")
    state: NodePresence | None = None
    """Only nodes whose last known state is this."""
    healthy: Flag | None = None
    """True for nodes that passed their last check, false for the others."""
    suspect: Flag | None = None
    """True for nodes with evidence against them, false for the others."""
    excluded: Flag | None = None
    """True for nodes that are excluded now, false for the others."""
    attention: Flag | None = None
    """True for nodes that are unhealthy, suspect or excluded now, false for the others."""
    q: str | None = Field(None, max_length=128, pattern=TEXT)
    """Only nodes whose id or address contains this text, in upper or lower case."""
    sort: Literal["node", "strikes"] = "node"
    """By id, or those with the most strikes first; by `strikes`, nodes move while you turn pages,
    and `order` is of the ids of those with equally many."""
    order: Literal["asc", "desc"] = Field("asc", description="The order of their ids.")


class CheckFilter(Paging):
    """Filters of the checks of a node."""

    healthy: Flag | None = None
    """True for examinations without a problem, false for the others."""
    order: Literal["asc", "desc"] = "desc"
    """The order of their places in the log."""


@router.get("/nodes", summary="List nodes", responses=responses())
async def list_nodes(
    context: Ctx, _token: Reader, asked: Annotated[NodeFilter, Query()]
) -> PageOf[Node]:
    """Nodes of all jobs, by id, or the most suspicious first."""
    now_us = to_us(context.clock.wall())
    conditions = _conditions(asked, now_us)
    if asked.sort == "node":
        by_id = SortOrder((tables.nodes.c.node,), is_descending=asked.order == "desc")
        query = nodes_with_state().where(*conditions)
        listing = await paged(context, query, by_id, asked, "/nodes")
        names = tuple(str(row["node"]) for row in listing.rows)
        counts = await _counts(context, names) if names else None
    else:
        counts = await _counts(context, ())
        place = _strikes(counts, is_descending=asked.order == "desc").label("place")
        worst = SortOrder((place, tables.nodes.c.node), is_descending=asked.order == "desc")
        query = nodes_with_state().add_columns(place).where(*conditions)
        listing = await paged(context, query, worst, asked, "/nodes")
    items = [Node(**_shown(context, row, counts)) for row in listing.rows]
    return PageOf[Node](items=items, next=listing.next)


@router.get("/nodes/{node}", summary="One node", responses=responses(404))
async def get_node(context: Ctx, _token: Reader, node: NodeName) -> NodeDetail:
    """A node, with the present reports of health and of its agent. Its history: `/facts?node=…`."""
    row = await first(context.database, nodes_with_state().where(tables.nodes.c.node == node))
    heard = context.beats.node(node)
    if row is None:
        raise not_found(f"node {node}{await similar_nodes(context.database, node)}")
    standing: NodeStanding | None = None
    missing: str | None = None
    try:
        standings = await _standings(context, (node,))
        standing = next((item for item in standings if item.node == node), None)
        missing = None if standing else f"health does not know {node}"
        if standing and (standing.state, row["state"]) == ("healthy", "lost"):  # it has restarted
            standing, missing = None, "health has not heard of it since it was lost"
    except (RequestError, BusDeniedError) as error:
        missing = str(error)
    counts = None if standing is None else {node: standing.strikes}
    return NodeDetail(
        **_shown(context, row, counts),
        standing=None if standing is None else _standing(standing),
        standing_missing=missing,
        now=None if heard is None else _now(heard),
        last_check=await _last_check(context, node),
    )


@router.get("/nodes/{node}/checks", summary="A node's checks", responses=responses(404))
async def list_checks(
    context: Ctx, _token: Reader, node: NodeName, asked: Annotated[CheckFilter, Query()]
) -> PageOf[Examination]:
    """The results of all checks of the node, the newest first."""
    query_of_node = select(tables.nodes.c.node).where(tables.nodes.c.node == node)
    if await first(context.database, query_of_node) is None:
        raise not_found(f"node {node}{await similar_nodes(context.database, node)}")
    checks = tables.node_checks
    query = select(checks).where(checks.c.node == node)
    if asked.healthy is not None:
        query = query.where(checks.c.is_healthy.is_(asked.healthy))
    order = SortOrder((checks.c.n,), is_descending=asked.order == "desc")
    listing = await paged(context, query, order, asked, f"/nodes/{node}/checks")
    items = [Examination(**present(row)) for row in listing.rows]
    return PageOf[Examination](items=items, next=listing.next)


async def _standings(context: Context, nodes: tuple[str, ...]) -> tuple[NodeStanding, ...]:
    question = ShowNodes(job=CLUSTER, nodes=nodes)
    answer = await ask(
        context.bus, "health", "nodes", question, NodeStandings, see="nodes", within_s=LOOK_WITHIN_S
    )
    return answer.nodes


async def _counts(context: Context, nodes: tuple[str, ...]) -> Mapping[str, int] | None:
    """Present strikes of these nodes, or of those with the most; None when health is away."""
    try:
        standings = await _standings(context, nodes)
    except (RequestError, BusDeniedError):
        return None
    struck = sorted((-item.strikes, item.node) for item in standings if item.strikes)
    return {node: -strikes for strikes, node in struck[:_STRUCK_MOST]}


def _strikes(counts: Mapping[str, int] | None, *, is_descending: bool) -> ColumnElement[int]:
    """The sort key that puts nodes with the most strikes first, for both directions of ids."""
    nodes = tables.nodes.c
    strikes: ColumnElement[int] = func.coalesce(nodes.strikes, 0)
    if counts:
        strikes = case(dict(counts), value=nodes.node, else_=0)
    elif counts is not None:
        strikes = strikes * 0  # health says that there are none
    return strikes if is_descending else -strikes


def _shown(context: Context, row: Record, counts: Mapping[str, int] | None) -> dict[str, Any]:
    heard = context.beats.node(str(row["node"]))
    probes = () if heard is None else heard.probes
    offset_s = None if heard is None else heard.clock_offset_s
    shown = {
        **present(row),
        "clock_offset_s": None if offset_s is None else round(offset_s, 3),
        "is_clock_wrong": context.beats.is_wrong(offset_s),
        "probes": [ProbeNow(**msgspec.structs.asdict(probe)) for probe in probes],
    }
    return shown if counts is None else {**shown, "strikes": counts.get(row["node"], 0)}


def _standing(standing: NodeStanding) -> Standing:
    failing = [CheckOut(**msgspec.structs.asdict(item)) for item in standing.failing]
    return Standing(**{**msgspec.structs.asdict(standing), "failing": failing})


def _now(heard: HeardBeat) -> NodeNow:
    beat = heard.beat
    shown = {
        "ranks": len(beat.ranks),
        "watch": beat.watch or None,
        "probes_failed": list(beat.probes_failed),
    }
    return NodeNow(
        **{**msgspec.structs.asdict(beat), **shown},
        heard_age_s=round(heard.age_s, 3),
        is_stale=heard.is_stale,
    )


async def _last_check(context: Context, node: str) -> Examination | None:
    checks = tables.node_checks
    query = select(checks).where(checks.c.node == node).order_by(checks.c.n.desc())
    row = await first(context.database, query)
    return None if row is None else Examination(**present(row))


def _is_excluded(now_us: int) -> ColumnElement[bool]:
    nodes = tables.nodes.c
    until = nodes.excluded_until_us
    is_excluded = func.coalesce(nodes.is_excluded, False).is_(True)
    return is_excluded & or_(until.is_(None), until > now_us)


def _conditions(asked: NodeFilter, now_us: int) -> list[ColumnElement[bool]]:
    nodes = tables.nodes.c
    conditions: list[ColumnElement[bool]] = []
    if asked.job is not None:
        conditions.append(nodes.job == asked.job)
    if asked.state is not None:
        conditions.append(node_state() == asked.state)
    if asked.healthy is not None:
        conditions.append(nodes.is_healthy.is_(asked.healthy))
    suspect, excluded = func.coalesce(nodes.is_suspect, False).is_(True), _is_excluded(now_us)
    if asked.suspect is not None:
        conditions.append(suspect if asked.suspect else ~suspect)
    if asked.excluded is not None:
        conditions.append(excluded if asked.excluded else ~excluded)
    if asked.attention is not None:
        sick = func.coalesce(nodes.is_healthy, True).is_(False)
        attention = sick | suspect | excluded
        conditions.append(attention if asked.attention else ~attention)
    if asked.q is not None:
        conditions.append(holds(nodes.node, asked.q) | holds(nodes.address, asked.q))
    return conditions
