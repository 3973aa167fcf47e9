"""`/log`: the end of the log of a rank that failed, even when its node is gone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Path, Query, Response
from sqlalchemy import select

from everstep.messages import BlobRef
from everstep.store import tables
from everstep.store.database import Database
from everstep.store.queries import Record, round_state
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.endpoints.evidence import blob_content
from everstep_services.history.api.http.parameters import JobName, RequestModel, RoundNumber, Whole
from everstep_services.history.api.http.problems import ProblemError, not_found, responses

router = APIRouter(tags=["logs"])

_LOGS = ("log", "stdout", "stderr")
"""Kinds of evidence that are the end of a log."""

Rank = Annotated[Whole, Path(description="The global rank.")]


class LogFilter(RequestModel):
    """The stream of the rank."""

    stream: Literal["stdout", "stderr"] | None = None
    """The stream; by default stderr, or stdout if stderr was empty."""


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
    """The end of a rank's log, kept when the rank fails; the whole log is on its node.

    The detail of 404 says why there is none, that of 410 why it is no longer there.
    """
    told = await _told(context.database, job, number, rank)
    data = await blob_content(context, _kept_where(told, asked.stream), "log_gone")
    return Response(data.decode(errors="replace"), media_type="text/plain")


@dataclass(frozen=True, slots=True)
class _Told:
    """The rows about a rank in a round, read in one snapshot."""

    job: str
    number: int
    rank: int
    round: Record | None
    exit: Record | None
    evidence: Sequence[Record]
    node: str | None


async def _told(database: Database, job: str, number: int, rank: int) -> _Told:
    rounds, exits, evidence = tables.rounds.c, tables.rank_exits, tables.evidence
    members = tables.round_members.c
    here = (evidence.c.job == job, evidence.c.round == number, evidence.c.rank == rank)
    mine = (exits.c.job == job, exits.c.round == number, exits.c.rank == rank)
    the_round = select(rounds.world_size, round_state().label("state"))
    the_node = select(members.node).where(
        members.job == job,
        members.round == number,
        members.first_rank <= rank,
        members.first_rank + members.ranks > rank,
    )
    # In one transaction: else a rank that fails meanwhile is in a round that has ended, and has
    # not failed.
    async with database.read() as connection:
        result = await connection.execute(
            the_round.where(rounds.job == job, rounds.round == number).limit(1)
        )
        round_ = result.mappings().one_or_none()
        result = await connection.execute(select(exits).where(*mine).order_by(exits.c.n).limit(1))
        exit_ = result.mappings().one_or_none()
        result = await connection.execute(
            select(evidence).where(*here, evidence.c.kind.in_(_LOGS)).order_by(evidence.c.n)
        )
        kept = result.mappings().all()
        node = await connection.scalar(the_node.limit(1))
    return _Told(job, number, rank, round_, exit_, kept, node)


def _kept_where(told: _Told, stream: str | None) -> BlobRef:
    blobs: dict[str, str] = {}
    absent: str | None = None
    if told.exit is not None and told.exit["log"] is not None:
        blobs["stderr"] = told.exit["log"]
    for row in told.evidence:
        absent = row["missing_reason"] or absent
        if row["blob"] is not None:
            blobs.setdefault(row["stream"] or "stderr", row["blob"])
    for wanted in ("stderr", "stdout") if stream is None else (stream,):
        if wanted in blobs:
            return msgspec.json.decode(blobs[wanted], type=BlobRef)
    if blobs:
        absent = f"only its {', '.join(blobs)} was"
    raise _why_none(told, absent)


def _why_none(told: _Told, absent: str | None) -> ProblemError:
    if told.round is None:
        return not_found(f"round {told.number} of job {told.job}")
    who = f"rank {told.rank} of round {told.number}"
    world_size = told.round["world_size"]
    if world_size is not None and told.rank >= world_size:
        return not_found(
            f"rank {told.rank} in round {told.number}: its ranks are 0 to {world_size - 1}"
        )
    if absent is not None:
        why = f"this end of the log of {who} was not kept: {absent}"
    elif told.exit is not None and not told.exit["is_failure"]:
        why = f"{who} ended well: only the ends of failed ranks' logs are kept"
    elif told.exit is not None:
        why = f"{who} failed, and had written nothing that could be kept"
    elif told.round["state"] == "ended":
        why = f"{who} did not fail by itself: only the ends of failed ranks' logs are kept"
    else:
        why = f"{who} has not ended: the end of its log is kept if it fails"
    where = told.node or "its node: run `everstep logs` there"
    return ProblemError(404, "log_not_kept", f"{why}; the whole of it is on {where}")
