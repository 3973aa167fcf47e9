"""A story for tests: four ranks on two nodes, one is killed, a restart, the training is back."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from everstep.messages import (
    ActionDecided,
    ActionTaken,
    BlobRef,
    Budget,
    ErrorRecord,
    EvidenceCollected,
    Fact,
    IncidentClosed,
    IncidentExtended,
    IncidentOpened,
    JobSpec,
    JobStarted,
    Ledger,
    Member,
    Option,
    ProgressMade,
    RankExited,
    RanksStopped,
    RankStalled,
    Replacement,
    RoundEnded,
    RoundFormed,
    RoundStarted,
    StallLocated,
    StateHealed,
)
from tests.unit.history.facts import BEGAN, fact_id

JOB, INCIDENT = "llama-8b", "0193aefc11e25f0a8c7d4b6e9f201c3d"
TRACEBACK = """Traceback (most recent call last):
  File "/home/ann/train.py", line 212, in <module>
    main()
  File "/home/ann/train.py", line 88, in step
    loss.backward()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB
"""
LEDGER = Ledger(
    detect_s=0.012,
    evidence_s=0.3,
    decide_s=0.004,
    stop_s=0.21,
    rendezvous_s=0.031,
    start_s=0.18,
    first_step_s=0.42,
)
BLOB = BlobRef(job=JOB, id="a" * 32, size_bytes=4096, parts=1)


def _at(seconds: float, source: str, **more: Any) -> dict[str, Any]:
    at = BEGAN + timedelta(seconds=seconds)
    return {"id": fact_id(), "job": JOB, "at": at, "source": source, **more}


def _rendezvous(seconds: float, **more: Any) -> dict[str, Any]:
    return _at(seconds, "rendezvous", **more)


def begun() -> Sequence[Fact]:
    """The job runs its first round, and has made a thousand steps."""
    spec = JobSpec(
        name="llama 8b",
        labels={"team": "vision"},
        command=("python", "train.py", "--lr", "3e-4"),
        config_fingerprint="f" * 16,
        nodes_min=2,
        nodes_max=2,
        ranks_per_node=2,
        spares=1,
        max_restarts=10,
        max_restarts_per_hour=4,
    )
    return [
        JobStarted(**_rendezvous(0), spec=spec, world_size=4, allocation="a1", user="ann"),
        _formed(0.1, 1, ("node-1", "node-2"), cause="start"),
        _started(0.4, 1),
        ProgressMade(**_at(0.9, "agent/node-1", round=1), step=1, node="node-1", is_first=True),
        ProgressMade(**_at(60.9, "agent/node-1", round=1), step=1000, node="node-1"),
    ]


def killed(blob: BlobRef | None = BLOB) -> Sequence[Fact]:
    """Rank 2 runs out of memory; rank 0 fails with it; the round ends."""
    error = ErrorRecord(
        name="torch.OutOfMemoryError",
        text="CUDA out of memory. Tried to allocate 2.00 GiB",
        traceback=TRACEBACK,
        place="train.py:88 in step",
        chain=("RuntimeError",),
    )
    reason = "rank 2 on node-2 ended with exit code 1: torch.OutOfMemoryError at train.py:88"
    about: dict[str, Any] = {"incident": INCIDENT, "node": "node-2", "rank": 2}
    first = _exit(61.0, "node-2", 1, 2, error=error, log=blob, exit_code=1)
    return [
        first,
        _exit(61.2, "node-1", 0, 0, how="signal", signal="SIGABRT", log=None),
        IncidentOpened(
            **_rendezvous(61.01, round=1),
            **about,
            trigger="rank_exited",
            reason=reason,
            trigger_fact=first.id,
            step=1010,
            phase="step",
        ),
        RoundEnded(
            **_rendezvous(61.01, round=1),
            **about,
            cause="rank_exited",
            reason=reason,
            lasted_s=60.9,
            last_step=1010,
            trigger=first.id,
        ),
        IncidentExtended(
            **_rendezvous(61.4, round=1), incident=INCIDENT, reports=("f1",), nodes=("node-1",),
            ranks=2, reason="1 rank more failed after it",
        ),
        EvidenceCollected(
            **_at(61.3, "agent/node-2", round=1), **about, evidence="stderr", blob=blob,
            summary="CUDA out of memory",
        ),
        EvidenceCollected(
            **_at(61.3, "agent/node-2", round=1), **about, evidence="flight_recorder",
            missing="the rank had exited",
        ),
    ]  # fmt: skip


def decided() -> Sequence[Fact]:
    """A restart, with a spare in the place of the node."""
    decision = ActionDecided(
        **_rendezvous(61.31, round=1),
        action="restart",
        reason="1 of 10 restarts used, 1 of 4 in this hour; 1010 steps were made in round 1",
        rule="restart.budget_left",
        incident=INCIDENT,
        missing=("flight_recorder of rank 2: the rank had exited",),
        considered=(
            Option(action="stop", rejected="first failure with this fingerprint, 2 are needed"),
            Option(action="wait", rejected="a spare is warm: node-3"),
        ),
        budgets=(
            Budget(name="restarts", limit=10, left=9),
            Budget(name="restarts_per_hour", limit=4, left=3),
        ),
        nodes_out=("node-2",),
        nodes_in=("node-3",),
        took_s=0.3,
    )
    return [
        decision,
        RanksStopped(
            **_at(61.5, "agent/node-1", round=1), node="node-1", slot=0, ranks=(1,), stop_s=0.2
        ),
        RanksStopped(
            **_at(61.5, "agent/node-2", round=1), node="node-2", slot=1, ranks=(3,), stop_s=0.21,
            killed=(3,),
        ),
        ActionTaken(
            **_rendezvous(61.9), decision=decision.id, action="restart", outcome="done",
            reason="round 2 runs", incident=INCIDENT, took_s=0.6,
        ),
    ]  # fmt: skip


def back() -> Sequence[Fact]:
    """Round 2 makes its first step."""
    replaced = Replacement(slot=1, node="node-3", was="node-2", reason="it failed, a spare is warm")
    return [
        _formed(61.53, 2, ("node-1", "node-3"), cause="restart", incident=INCIDENT, restarts=1,
                replaced=(replaced,), spares=("node-2",)),
        _started(61.71, 2),
        ProgressMade(
            **_at(62.13, "agent/node-1", round=2), step=1001, node="node-1", is_first=True,
            lost_steps=10,
        ),
        IncidentClosed(
            **_rendezvous(62.14, round=2),
            incident=INCIDENT,
            outcome="recovered",
            reason="rank 2 on node-2 ran out of memory; node-3 took its slot, and training went on "
            "from step 1000",
            ledger=LEDGER,
            lost_steps=10,
            lost_s=0.6,
            restored_step=1000,
            restored_tier="global",
            next_round=2,
            reports=2,
        ),
    ]  # fmt: skip


def healed() -> Sequence[Fact]:
    """Instead: all but one rank go on into round 2 with their states."""
    story = "rank 2 on node-2 ended; rank 2 was replaced, 3 kept their state, 0 steps lost"

    def state(rank: int, node: str, **more: Any) -> StateHealed:
        about = _at(61.8, f"agent/{node}", round=2)
        return StateHealed(
            **about, node=node, slot=rank // 2, rank=rank, local_rank=rank % 2, step=1010, **more
        )

    return [
        _formed(61.53, 2, ("node-1", "node-2"), cause="restart", incident=INCIDENT, restarts=1),
        _started(61.66, 2),
        state(2, "node-2", origin="rank", donor=3, size_bytes=1 << 30, took_s=0.11),
        state(0, "node-1", origin="own", took_s=0.12, kept=3, replaced=1, replaced_ranks=(2,)),
        ProgressMade(
            **_at(61.9, "agent/node-1", round=2), step=1011, node="node-1", is_first=True
        ),
        IncidentClosed(
            **_rendezvous(61.9, round=1), incident=INCIDENT, outcome="recovered",
            reason=f"{story}; round 2 has made its first step", lost_steps=0, next_round=2,
            ledger=Ledger(detect_s=0.012, stop_s=0.3, start_s=0.13, heal_s=0.12, first_step_s=0.1),
        ),
    ]  # fmt: skip


def stalled(job: str) -> Sequence[Fact]:
    """Another job: rank 2 stops in its data section, and the other three wait for it."""

    def about(seconds: float, source: str, **more: Any) -> dict[str, Any]:
        return {**_at(seconds, source, round=1), "job": job, **more}

    def stall(rank: int, waited_s: float, section: str, **more: Any) -> RankStalled:
        node = f"node-{rank // 2 + 1}"
        values: dict[str, Any] = {"limit_s": 30.0, "limit_source": "learned", **more}
        return RankStalled(
            **about(90 + rank / 10, f"agent/{node}"),
            node=node,
            slot=rank // 2,
            rank=rank,
            local_rank=rank % 2,
            waited_s=waited_s,
            phase="section",
            section=section,
            step=1204,
            **values,
        )

    first = stall(2, 31.2, "data", blocked_in="it waits for a pipe (pipe_read)")
    return [
        JobStarted(
            **_at(0, "rendezvous") | {"job": job},
            spec=JobSpec(
                name=job, labels={}, command=("train",), config_fingerprint="f", nodes_min=2,
                nodes_max=2, ranks_per_node=2,
            ),
            world_size=4,
            allocation="a1",
        ),
        first,
        stall(0, 30.1, "backward", limit_s=120.0, limit_source="floor"),
        IncidentOpened(
            **about(90.3, "rendezvous"),
            incident="stalled",
            node="node-2",
            rank=2,
            trigger="rank_stalled",
            reason="rank 2 on node-2 made no progress for 31.2 s in section data (limit 30 s)",
            trigger_fact=first.id,
            step=1204,
            phase="section",
            section="data",
        ),
        StallLocated(
            **about(91, "health"),
            first_ranks=(2,),
            nodes=("node-2",),
            waiting_ranks=3,
            section="data",
            lead_s=4.2,
            is_certain=True,
            reason="rank 2 on node-2 in section data stopped 4.2 s before all others",
        ),
    ]  # fmt: skip


def whole(blob: BlobRef | None = BLOB) -> Sequence[Fact]:
    """All of it."""
    return [*begun(), *killed(blob), *decided(), *back()]


def _formed(seconds: float, number: int, nodes: Sequence[str], **more: Any) -> RoundFormed:
    members = tuple(
        Member(slot=slot, node=node, first_rank=slot * 2, ranks=2)
        for slot, node in enumerate(nodes)
    )
    return RoundFormed(
        **_rendezvous(seconds, round=number),
        members=members,
        world_size=4,
        waited_s=0.03,
        allocation="a1",
        **more,
    )


def _started(seconds: float, number: int) -> RoundStarted:
    return RoundStarted(
        **_rendezvous(seconds, round=number),
        start_s=0.18,
        master_address="node-1",
        master_port=29400 + number,
        warm_ranks=4,
        slowest_node="node-1",
    )


def _exit(seconds: float, node: str, slot: int, rank: int, **more: Any) -> RankExited:
    values: dict[str, Any] = {"how": "error", "pid": 4000 + rank, "lasted_s": 60.5, **more}
    return RankExited(
        **_at(seconds, f"agent/{node}", round=1),
        node=node,
        slot=slot,
        rank=rank,
        local_rank=rank % 2,
        step=1010,
        section="forward_backward",
        **values,
    )
