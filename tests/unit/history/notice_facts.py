"""Facts for tests of notifications, with only what matters there."""

from datetime import UTC, datetime
from typing import Any

from everstep.ids import id_from
from everstep.messages import (
    ActionDecided,
    AllocationEnded,
    Fact,
    IncidentClosed,
    IncidentExtended,
    IncidentOpened,
    JobEnded,
    Ledger,
    NodeExcluded,
    NodeIncluded,
    NodeLeft,
    NodeLost,
    OperatorActed,
    StragglerCleared,
    StragglerFound,
    VerdictReached,
)
from everstep.subjects import CLUSTER

BEGAN_S = 1_800_000_000.0


def _head(kind: str, job: str, name: str, at: datetime | None) -> dict[str, Any]:
    when = datetime.fromtimestamp(BEGAN_S + 1, UTC) if at is None else at
    return {"id": id_from(kind, job, name), "job": job, "at": when, "source": "test"}


def opened(
    incident: str, *, job: str = "j", at: datetime | None = None, reason: str = "rank 3 died"
) -> IncidentOpened:
    return IncidentOpened(
        **_head("opened", job, incident, at), incident=incident, trigger="rank_exited",
        reason=reason, rank=3, node="n1",
    )  # fmt: skip


def extended(
    incident: str, ranks: int, *, job: str = "j", at: datetime | None = None
) -> IncidentExtended:
    return IncidentExtended(
        **_head("extended", job, f"{incident} {ranks}", at), incident=incident, reports=(),
        ranks=ranks,
    )  # fmt: skip


def judged(
    incident: str, cause: str, revision: int = 0, *, job: str = "j", at: datetime | None = None,
    reason: str = "its memory is bad",
) -> VerdictReached:  # fmt: skip
    return VerdictReached(
        **_head("judged", job, f"{incident} {revision}", at), incident=incident, cause=cause,
        confidence=0.8, reason=reason, culprit_ranks=(3,), culprit_nodes=("n1",),
        revision=revision,
    )  # fmt: skip


def watched(incident: str) -> ActionDecided:
    """Nothing is done about a stall."""
    return ActionDecided(
        **_head("watched", "j", incident, None), action="restart", reason="rank 3 stands",
        rule="restart.observe", mode="observe", incident=incident,
    )  # fmt: skip


def decided(incident: str, *, job: str = "j", at: datetime | None = None) -> ActionDecided:
    return ActionDecided(
        **_head("decided", job, incident, at), action="restart", reason="2 restarts are left",
        rule="restart.budget_left", incident=incident,
    )  # fmt: skip


def closed(
    incident: str, outcome: str = "recovered", *, job: str = "j", at: datetime | None = None
) -> IncidentClosed:
    return IncidentClosed(
        **_head("closed", job, incident, at), incident=incident, outcome=outcome,
        reason="round 2 trains", ledger=Ledger(detect_s=1.0, start_s=2.5), lost_s=4.0,
        lost_steps=7,
    )  # fmt: skip


def job_ended(
    state: str, *, job: str = "j", incident: str | None = None, at: datetime | None = None
) -> JobEnded:
    return JobEnded(
        **_head("ended", job, state, at), state=state, exit_code=1, reason="the budget is spent",
        incident=incident,
    )  # fmt: skip


def allocation_ended(
    exit_code: int | None, *, state: str = "failed", allocation: str = "a", job: str = "j"
) -> AllocationEnded:
    return AllocationEnded(
        **_head("allocation", job, allocation, None), allocation=allocation, state=state,
        exit_code=exit_code, reason="round 5: 1 of 2 nodes joined within 600 s",
    )  # fmt: skip


def asked_to_stop(
    *, job: str = "j", origin: str = "cli", at: datetime | None = None
) -> OperatorActed:
    return OperatorActed(
        **_head("operated", job, origin, at), by="ann", action="stop_job", target="",
        outcome="accepted", reason="enough", origin=origin,
    )  # fmt: skip


def slow(rank: int, *, job: str = "j", at: datetime | None = None) -> StragglerFound:
    return StragglerFound(
        **_head("slow", job, str(rank), at), round=1, node="n1", slot=0, rank=rank,
        cause="host", reason="40 % slower than its peers", slowdown_ratio=0.12,
    )  # fmt: skip


def fast(rank: int, *, job: str = "j", at: datetime | None = None) -> StragglerCleared:
    return StragglerCleared(
        **_head("fast", job, str(rank), at), round=1, node="n1", rank=rank,
        reason="keeps up", finding=slow(rank, job=job).id, lost_s=12.0,
    )  # fmt: skip


def excluded(node: str, number: int = 0, *, at: datetime | None = None) -> NodeExcluded:
    return NodeExcluded(
        **_head("excluded", CLUSTER, f"{node} {number}", at), node=node, by="health",
        reason="3 strikes", ttl_s=3600.0,
    )  # fmt: skip


def included(node: str, number: int = 0, *, at: datetime | None = None) -> NodeIncluded:
    return NodeIncluded(
        **_head("included", CLUSTER, f"{node} {number}", at), node=node, by="health",
        reason="its time is over",
    )  # fmt: skip


def asked_to_drain(
    node: str, number: int = 0, *, job: str = "j", outcome: str = "accepted"
) -> OperatorActed:
    return OperatorActed(
        **_head("drained", job, f"{node} {number}", None), by="change-management (webhook)",
        action="drain_node", target=node, outcome=outcome, reason="new fans (CHG-1)", origin="rest",
    )  # fmt: skip


def left(node: str, *, job: str = "j", at: datetime | None = None) -> NodeLeft:
    return NodeLeft(
        **_head("left", job, node, at), node=node, cause="excluded", reason="n1 is replaced"
    )


def lost(node: str, *, job: str = "j") -> NodeLost:
    return NodeLost(
        **_head("lost", job, node, None), node=node, silence_s=3.0, limit_s=3.0, reason="silent"
    )


def story(incident: str, *, job: str = "j") -> list[Fact]:
    """All that is recorded about one incident."""
    return [
        opened(incident, job=job),
        extended(incident, 8, job=job),
        judged(incident, "gpu", job=job),
        decided(incident, job=job),
        closed(incident, job=job),
    ]
