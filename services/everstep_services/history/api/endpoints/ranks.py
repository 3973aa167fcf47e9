"""`/jobs/{job}/ranks`: the present state of ranks, from the last beats of their agents."""

from collections import Counter
from collections.abc import Collection
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import select

from everstep.job_states import WITH_RANKS
from everstep.messages import RankBeat
from everstep.store import tables
from everstep.store.queries import Record, SortOrder, first, is_begun, job_state, page
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.dto.health import RankNow, Ranks
from everstep_services.history.api.http.list_pages import Paging
from everstep_services.history.api.http.parameters import NAME, JobName, Word
from everstep_services.history.api.http.problems import responses
from everstep_services.history.api.service_calls import no_such_job
from everstep_services.history.beats import HeardBeat, JobView

router = APIRouter(tags=["jobs"])

_NAMED_MOST = 100
_MEMBERS_MOST = 100_000


class RankFilter(Paging):
    """Filters of the list of ranks."""

    state: list[Word] | None = Field(None, max_length=10, examples=[["stalled"]])
    """Only in one of these states."""
    node: str | None = Field(None, pattern=NAME, description="Only on this node.")


@router.get("/jobs/{job}/ranks", summary="A job's ranks, now", responses=responses(404))
async def list_ranks(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[RankFilter, Query()]
) -> Ranks:
    """Ranks of the newest round, by number, from the last beats of agents, which are not stored.

    `note` says when, and why, this is not their present state.
    """
    query = select(tables.jobs, job_state().label("state"))
    row = await first(context.database, query.where(tables.jobs.c.job == job, is_begun()))
    if row is None:
        raise await no_such_job(context, job)
    view = context.beats.view(job)
    silent = await _silent_nodes(context, row, view)
    question = asked.question(f"/jobs/{job}/ranks")
    after = -1
    if asked.cursor is not None:
        after = int(context.cursors.read(asked.cursor, question)[0])
    wanted = sorted(rank for rank in view.ranks if _is_wanted(view, rank, asked))
    rest = [rank for rank in wanted if rank > after]
    shown = rest[: asked.limit]
    note = _note(context, row, view, silent)
    return Ranks(
        items=[_rank(*view.ranks[rank]) for rank in shown],
        next=context.cursors.make((shown[-1],), question) if len(rest) > len(shown) else None,
        round=view.round,
        states=Counter(_state(*rank) for rank in view.ranks.values()),
        is_stale=note is not None and row["state"] in WITH_RANKS and context.bundle is None,
        note=note,
        silent_nodes=silent[:_NAMED_MOST],
    )


def _is_wanted(view: JobView, rank: int, asked: RankFilter) -> bool:
    beat, heard = view.ranks[rank]
    if asked.node is not None and heard.beat.node != asked.node:
        return False
    return not asked.state or _state(beat, heard) in asked.state


def _state(beat: RankBeat, heard: HeardBeat) -> str:
    """For people: a rank without a step may have run its script for long."""
    return "running" if (beat.state, heard.beat.state) == ("starting", "running") else beat.state


def _rank(beat: RankBeat, heard: HeardBeat) -> RankNow:
    shown = {
        "state": _state(beat, heard),
        "progress_age_s": None if beat.state == "starting" else beat.progress_age_s,
        "limit_source": beat.limit_source or None,
        "limit_name": beat.limit_name or None,
    }
    return RankNow(
        **{**msgspec.structs.asdict(beat), **shown},
        node=heard.beat.node,
        slot=heard.beat.slot,
        heard_age_s=round(heard.age_s, 3),
        is_stale=heard.is_stale,
    )


async def _silent_nodes(context: Context, job: Record, view: JobView) -> list[str]:
    """Nodes that have ranks, by the record or their own beats, and that are silent."""
    if job["state"] not in WITH_RANKS or context.bundle is not None:
        return []
    members = tables.round_members.c
    here = (members.job == job["job"], members.round == job["round"], members.node.is_not(None))
    query = select(members.node, members.slot).where(*here)
    listing = await page(context.database, query, SortOrder((members.slot,)), None, _MEMBERS_MOST)
    fresh = {node.beat.node for node in view.nodes if not node.is_stale}
    with_ranks = {heard.beat.node for _, heard in view.ranks.values()}
    return sorted({*(str(row["node"]) for row in listing.rows), *with_ranks} - fresh)


def _note(context: Context, job: Record, view: JobView, silent: Collection[str]) -> str | None:
    if job["state"] not in WITH_RANKS:
        return f"no ranks run: the job is {job['state']}"
    ages = {node.beat.node: node.age_s for node in view.nodes}
    if context.bundle is not None:
        return "the positions of ranks are known only while they run: a bundle has none"
    if not context.connectedness.is_bus_connected():
        ago = f": this is how it was {min(ages.values()):.0f} s ago" if ages else ""
        return f"the bus is away{ago}"
    if not ages:
        listening_s = context.beats.listening_s
        return f"no agent was heard in the {listening_s:.0f} s that this replica has listened"
    if not silent:
        return None
    name = min(silent, key=lambda node: -ages.get(node, float("inf")))
    text = f"{name} was not heard yet"
    if name in ages:
        text = f"{name} was last heard {ages[name]:.0f} s ago"
    others = len(silent) - 1
    return f"{text}, and {others} more {'is' if others == 1 else 'are'} silent" if others else text
