"""`/log`: the end of what a rank had said when it failed, whether or not its node is left."""

import asyncio
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import select

from everstep.bus.errors import BlobMissingError, BusError
from everstep.messages import BlobRef
from everstep.store import tables
from everstep.store.reads import Record, first, round_state
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.parameters import LARGEST, JobName, RoundNumber
from everstep_services.history.api.problems import ProblemError, not_found, responses

router = APIRouter(tags=["logs"])

_FETCH_WITHIN_S = 5.0
_LOGS = ("log", "stdout", "stderr")
"""Kinds of evidence that are the end of a log."""

Rank = Annotated[int, Path(ge=0, le=LARGEST, description="The global rank.")]


class LogFilter(BaseModel):
    """Which of its streams."""

    model_config = ConfigDict(extra="forbid")

    stream: Literal["stdout", "stderr"] | None = Field(
        None, description="Without it, stderr, or stdout when stderr was empty."
    )


@router.get(
    "/jobs/{job}/rounds/{number}/ranks/{rank}/log",
    summary="The end of a rank's log",
    response_class=Response,
    responses={
        **responses(404, 410),
        200: {
            "description": "The last lines that the rank wrote, at most some 64 KiB.",
            "content": {"text/plain": {"schema": {"type": "string"}}},
        },
    },
)
async def get_log(
    context: Ctx,
    _token: Reader,
    job: JobName,
    number: RoundNumber,
    rank: Rank,
    asked: Annotated[LogFilter, Query()],
) -> Response:
    """What a rank said last, kept when it fails; the whole of its log is on its node.

    404 says why there is none, 410 why it is there no longer.
    """
    ref = await _kept_where(context, job, number, rank, asked.stream)
    data = await _content(context, ref)
    return Response(data.decode(errors="replace"), media_type="text/plain")


async def _kept_where(
    context: Context, job: str, number: int, rank: int, stream: str | None
) -> BlobRef:
    exits, evidence = tables.rank_exits, tables.evidence
    mine = (exits.c.job == job, exits.c.round == number, exits.c.rank == rank)
    exit_ = await first(context.database, select(exits).where(*mine).order_by(exits.c.n))
    found: dict[str, str] = {}
    absent: str | None = None
    if exit_ is not None and exit_["log"] is not None:
        found["stderr"] = exit_["log"]
    async with context.database.read() as connection:
        here = (evidence.c.job == job, evidence.c.round == number, evidence.c.rank == rank)
        query = select(evidence).where(*here, evidence.c.kind.in_(_LOGS)).order_by(evidence.c.n)
        for row in (await connection.execute(query)).mappings():
            absent = row["missing_reason"] or absent
            if row["blob"] is not None:
                found.setdefault(row["stream"] or "stderr", row["blob"])
    for wanted in ("stderr", "stdout") if stream is None else (stream,):
        if wanted in found:
            return msgspec.json.decode(found[wanted], type=BlobRef)
    if found:
        absent = f"only its {', '.join(found)} was"
    raise await _why_none(context, job, number, rank, exit_, absent)


async def _content(context: Context, ref: BlobRef) -> bytes:
    kept = await context.kept.find(ref.id)
    if kept is not None and kept.data is not None:
        return kept.data
    try:
        async with asyncio.timeout(_FETCH_WITHIN_S):
            return await context.bus.blobs.get(ref)
    except BlobMissingError as error:
        why = kept.absent if kept is not None and kept.absent else str(error)
        raise ProblemError(410, "log_gone", f"it was kept once: {why}") from None
    except (BusError, TimeoutError):
        raise ProblemError(
            503,
            "bus_unavailable",
            "it has not been copied yet, and the bus that has it cannot be reached: try again "
            "when the bus is back (`is_bus_connected` in /api/v1/status)",
            headers={"Retry-After": "5"},
        ) from None


async def _why_none(
    context: Context, job: str, number: int, rank: int, exit_: Record | None, absent: str | None
) -> ProblemError:
    rounds = tables.rounds.c
    query = select(rounds.world_size, round_state().label("state"))
    row = await first(context.database, query.where(rounds.job == job, rounds.round == number))
    if row is None:
        return not_found(f"round {number} of job {job}")
    who = f"rank {rank} of round {number}"
    if row["world_size"] is not None and rank >= row["world_size"]:
        last = row["world_size"] - 1
        return not_found(f"rank {rank} in round {number}: its ranks are 0 to {last}")
    if absent is not None:
        why = f"this end of the log of {who} was not kept: {absent}"
    elif exit_ is not None and not exit_["is_failure"]:
        why = f"{who} ended well: only the ends of failed ranks' logs are kept"
    elif exit_ is not None:
        why = f"{who} failed, and had written nothing that could be kept"
    elif row["state"] == "ended":
        why = f"{who} did not fail by itself: only the ends of failed ranks' logs are kept"
    else:
        why = f"{who} has not ended: the end of its log is kept if it fails"
    where = await _node(context, job, number, rank)
    return ProblemError(404, "log_not_kept", f"{why}; the whole of it is on {where}")


async def _node(context: Context, job: str, number: int, rank: int) -> str:
    members = tables.round_members.c
    query = select(members.node).where(
        members.job == job,
        members.round == number,
        members.first_rank <= rank,
        members.first_rank + members.ranks > rank,
    )
    row = await first(context.database, query)
    return "its node: run `everstep logs` there" if row is None else f"{row['node']}"
