"""Cases and claims for the tests of attribution."""

from datetime import UTC, datetime, timedelta
from typing import Any

from everstep.messages import (
    BlobRef,
    Case,
    ErrorRecord,
    EvidenceCollected,
    IncidentOpened,
    Member,
    RankEnd,
    RankExited,
    RoundFormed,
)
from everstep.verdict_causes import VerdictCause
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident

NOON = datetime(2026, 11, 23, 12, tzinfo=UTC)
PEER = "Connection closed by peer [10.0.0.3]:4711"


def claim(cause: VerdictCause = "user_code", strength: float = 0.9, **more: Any) -> Claim:
    given = {"kind": "some_kind", "says": f"{cause} did it", "analyzer": "ends", **more}
    return Claim(cause=cause, strength=strength, **given)


def case(nodes: int = 2, ranks: int = 2, **more: Any) -> Case:
    """An incident of a round with `nodes` nodes of `ranks` ranks each."""
    members = tuple(
        Member(slot=n, node=f"n{n}", first_rank=n * ranks, ranks=ranks) for n in range(nodes)
    )
    given = {"job": "j", "incident": "i", "round": 1, "trigger": "rank_exited", **more}
    return Case(members=members, world_size=nodes * ranks, opened_at=NOON, **given)


def end(rank: int, *, after_s: float = 0.0, node: str = "", **more: Any) -> RankEnd:
    given: dict[str, Any] = {"how": "error", "exit_code": 1, "round": 1, **more}
    at = NOON + timedelta(seconds=after_s)
    return RankEnd(rank=rank, node=node or f"n{rank // 2}", fact=f"end-{rank}", at=at, **given)


def raised(
    rank: int, name: str, text: str, place: str = "train.py:8 in step", **more: Any
) -> RankEnd:
    return end(rank, error_name=name, error_text=text, place=place, **more)


def lost_peer(rank: int, **more: Any) -> RankEnd:
    return raised(rank, "RuntimeError", PEER, **more)


async def nothing(ref: BlobRef) -> bytes:
    """No evidence can be had."""
    raise AssertionError(f"nobody should ask for {ref}")


def incident(of: Case) -> Incident:
    return Incident(of, nothing)


def about(job: str = "j", round_: int = 1, **more: Any) -> dict[str, Any]:
    """What every fact says."""
    return {"job": job, "at": NOON, "source": "agent/n0", "round": round_, **more}


def formed(nodes: int = 2, ranks: int = 2, round_: int = 1, job: str = "j") -> RoundFormed:
    members = case(nodes, ranks).members
    return RoundFormed(
        **about(job, round_, id=f"formed-{round_}"),
        members=members,
        world_size=nodes * ranks,
        waited_s=0.1,
        allocation="a",
    )


def exited(rank: int, round_: int = 1, job: str = "j", **more: Any) -> RankExited:
    given: dict[str, Any] = {"how": "error", "exit_code": 1, "lasted_s": 1.0, "pid": 7, **more}
    return RankExited(
        **about(job, round_, id=f"exit-{round_}-{rank}"),
        node=f"n{rank // 2}",
        slot=rank // 2,
        rank=rank,
        local_rank=rank % 2,
        **given,
    )


def error(name: str = "ValueError", text: str = "a bad batch") -> ErrorRecord:
    return ErrorRecord(name=name, text=text, place="train.py:8 in step")


def opened(round_: int = 1, job: str = "j", incident: str = "i", **more: Any) -> IncidentOpened:
    given = {"trigger": "rank_exited", "reason": "rank 3 exited with 1", **more}
    return IncidentOpened(**about(job, round_, id=f"opened-{incident}"), incident=incident, **given)


def collected(kind: str = "log", number: int = 0, **more: Any) -> EvidenceCollected:
    given = {"incident": "i", "node": "n0", **more}
    return EvidenceCollected(**about(id=f"{kind}-{number}"), evidence=kind, **given)
