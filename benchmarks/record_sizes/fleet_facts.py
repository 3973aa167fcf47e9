"""The facts of thousands of jobs over a month, in the order in which a record would get them."""

import random
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from everstep import ids
from everstep.messages import (
    ActionDecided,
    ActionTaken,
    AllocationEnded,
    AllocationStarted,
    Budget,
    CheckpointCommitted,
    ErrorRecord,
    EvidenceCollected,
    Fact,
    IncidentClosed,
    IncidentOpened,
    JobEnded,
    JobSpec,
    JobStarted,
    Ledger,
    Member,
    Option,
    ProgressMade,
    RankExited,
    RoundEnded,
    RoundFormed,
    RoundStarted,
    VerdictReached,
)
from everstep.messages.facts.incidents import EvidenceItem

BIG = "llama-405b-pretrain"
"""The job of 1 024 ranks, which has a twentieth of all facts."""
BIG_NODES, PER_NODE = 128, 8
_FLEET, _DAYS, _TOGETHER = 600, 30, 100
_BIG_SHARE, _RUNNING_SHARE, _BROKEN_SHARE, _OPEN_SHARE = 0.05, 0.03, 0.5, 0.01
_STEPS_A_REPORT = 75
USERS = ("ann", "kai", "mia", "noor")
TEAMS = ("audio", "llm", "vision")
_KINDS = ("torch.OutOfMemoryError", "RuntimeError", "ValueError", "OSError")


def job_name(number: int) -> str:
    """The name of one of the many jobs."""
    return f"run-{number:05d}"


def node_name(number: int) -> str:
    """The name of a node of the fleet."""
    return f"gpu-{number % _FLEET:04d}"


def fleet_facts(jobs: int, facts: int, now: datetime) -> Iterator[Fact]:
    """About this number of facts, of this number of jobs; a hundred jobs are mixed by time."""
    big = int(facts * _BIG_SHARE)
    each = (facts - big) / jobs
    for first in range(0, jobs, _TOGETHER):
        some = [
            fact
            for number in range(first, min(first + _TOGETHER, jobs))
            for fact in _JobTrace(number, jobs, now).facts(int(each))
        ]
        yield from sorted(some, key=lambda fact: fact.at)
    yield from _big_job(big, now)


class _JobTrace:
    """The life of one job: it starts, steps and saves; half of the jobs lose a rank."""

    def __init__(self, number: int, jobs: int, now: datetime) -> None:
        self._chance = random.Random(number)
        self.job = job_name(number)
        self._number = number
        self._is_running = number >= jobs * (1 - _RUNNING_SHARE)
        began_s = _DAYS * 86_400 * (1 - number / jobs) + 3600
        self._at = now - timedelta(seconds=3000 if self._is_running else began_s)
        self._nodes = [node_name(number * 3 + i) for i in range(4)]
        self._step = 0

    def facts(self, most: int) -> Iterator[Fact]:
        """This number at most, and hardly fewer."""
        yield from self._began()
        is_broken = self._number % 100 < _BROKEN_SHARE * 100
        rest = most - (25 if is_broken else 9)
        if not is_broken:
            yield from self._trained(1, rest)
        else:
            yield from self._trained(1, rest // 2)
            yield from self._lost_a_rank()
            yield from self._trained(2, rest - rest // 2)
        if not self._is_running:
            yield self._fact(JobEnded, state="done", exit_code=0, reason="all ranks finished")
            yield self._fact(AllocationEnded, allocation="a1", state="done", reason="it is over")

    def _fact(self, kind: type[Fact], after_s: float = 1.0, /, **values: Any) -> Fact:
        self._at += timedelta(seconds=after_s)
        values = {"source": "rendezvous", **values}
        return kind(id=ids.new_id(), job=self.job, at=self._at, **values)

    def _began(self) -> Iterator[Fact]:
        spec = JobSpec(
            name=self.job, labels={"team": TEAMS[self._number % 3], "size": "small"},
            command=("python", "train.py"), config_fingerprint=f"{self._number:016x}", nodes_min=4,
            nodes_max=4, ranks_per_node=PER_NODE,
        )  # fmt: skip
        yield self._fact(AllocationStarted, allocation="a1", scheduler="slurm")
        user = USERS[self._number % 4]
        yield self._fact(JobStarted, spec=spec, world_size=32, allocation="a1", user=user)
        yield from self._formed(1)

    def _formed(self, number: int, **more: Any) -> Iterator[Fact]:
        members = tuple(
            Member(slot=slot, node=node, first_rank=slot * PER_NODE, ranks=PER_NODE)
            for slot, node in enumerate(self._nodes)
        )
        yield self._fact(
            RoundFormed, round=number, members=members, cause="start", world_size=32, waited_s=2.0,
            allocation="a1", **more,
        )  # fmt: skip
        yield self._fact(
            RoundStarted, 8.0, round=number, start_s=8.0, master_address=self._nodes[0],
            master_port=29400, warm_ranks=32, slowest_node=self._nodes[-1],
        )  # fmt: skip

    def _trained(self, number: int, reports: int) -> Iterator[Fact]:
        for i in range(reports):
            if i % 5 == 4:
                yield self._fact(
                    CheckpointCommitted, round=number, step=self._step, tier="global",
                    path=f"s3://ckpt/{self.job}/{self._step}", size_bytes=1 << 34, shards=32,
                    world_size=32, lag_s=4.0, stall_s=0.2, write_s=3.5,
                )  # fmt: skip
                continue
            self._step += _STEPS_A_REPORT
            yield self._fact(
                ProgressMade, 60.0 if i else 5.0, round=number, step=self._step, is_first=not i,
                node=self._nodes[0], steps=_STEPS_A_REPORT, steps_s=60.0, step_p50_s=0.8,
                source=f"agent/{self._nodes[0]}",
            )  # fmt: skip

    def _lost_a_rank(self) -> Iterator[Fact]:
        incident = ids.new_id()
        slot, name = self._number % 4, _KINDS[self._number % len(_KINDS)]
        node, rank = self._nodes[slot], slot * PER_NODE + 3
        about: dict[str, Any] = {"incident": incident, "node": node, "rank": rank}
        reason = f"rank {rank} on {node} ended with exit code 1: {name}"
        error = ErrorRecord(name=name, text="it broke", traceback="Traceback …", place="train.py:9")
        first = self._fact(
            RankExited, round=1, node=node, slot=slot, rank=rank, local_rank=3, pid=4711,
            how="error", exit_code=1, lasted_s=900.0, error=error, source=f"agent/{node}",
        )  # fmt: skip
        yield first
        for other in range(3):
            yield self._fact(
                RankExited, 0.1, round=1, node=node, slot=slot, rank=slot * PER_NODE + other,
                local_rank=other, pid=4700 + other, how="signal", signal="SIGABRT", lasted_s=900.0,
            )  # fmt: skip
        yield self._fact(
            IncidentOpened, 0.1, round=1, trigger="rank_exited", reason=reason,
            trigger_fact=first.id, step=self._step, phase="step", **about,
        )  # fmt: skip
        yield self._fact(
            RoundEnded, 0.1, round=1, cause="rank_exited", reason=reason, lasted_s=900.0,
            last_step=self._step, trigger=first.id, **about,
        )  # fmt: skip
        for kind in ("log", "stacks", "kernel_log"):
            yield self._fact(
                EvidenceCollected, 0.1, round=1, evidence=kind, missing="not kept", **about
            )
        decision = self._fact(
            ActionDecided, 0.1, round=1, action="restart", rule="restart.budget_left",
            incident=incident, reason="1 of 20 restarts used",
            considered=(Option(action="stop", rejected="it is the first failure of its kind"),),
            budgets=(Budget(name="restarts", limit=20, left=19),), took_s=0.1,
        )  # fmt: skip
        yield decision
        yield self._fact(
            VerdictReached, round=1, incident=incident, cause="user_code", kind="exception",
            confidence=0.9, reason=f"Rank {rank} raised {name}.", culprit_ranks=(rank,),
            culprit_nodes=(node,), source="attribution", analyzers=("exits", "logs"),
            evidence=(EvidenceItem(says="it raised first", analyzer="exits", weight=3.0),),
            fingerprint=f"{name}:train.py:{self._number % 97}",
        )  # fmt: skip
        yield from self._formed(2, incident=incident, restarts=1)
        yield self._fact(
            ActionTaken, 0.1, round=1, decision=decision.id, action="restart", outcome="done",
            reason="round 2 runs", incident=incident, took_s=9.0,
        )  # fmt: skip
        if self._number % 100 >= _OPEN_SHARE * 100 or not self._is_running:
            yield self._fact(
                IncidentClosed, 0.1, round=2, incident=incident, outcome="recovered", reason=reason,
                ledger=Ledger(detect_s=0.1, evidence_s=0.3, decide_s=0.1, stop_s=1.0,
                              rendezvous_s=2.0, start_s=8.0, first_step_s=5.0),
                lost_steps=60, lost_s=50.0, next_round=2, reports=4,
            )  # fmt: skip


def _big_job(facts: int, now: datetime) -> Iterator[Fact]:
    """A job of 1 024 ranks that has run for months, and lost a rank in each of its rounds."""
    rounds = max(1, min(20, facts // 400))
    reports = max(2, facts // rounds - 6)
    at = now - timedelta(seconds=rounds * (reports + 1) * 60)

    def fact(kind: type[Fact], after_s: float, /, **values: Any) -> Fact:
        nonlocal at
        at += timedelta(seconds=after_s)
        return kind(id=ids.new_id(), job=BIG, at=at, **{"source": "rendezvous", **values})

    spec = JobSpec(
        name=BIG, labels={"team": "llm", "size": "large"}, command=("python", "pretrain.py"),
        config_fingerprint="b" * 16, nodes_min=BIG_NODES, nodes_max=BIG_NODES,
        ranks_per_node=PER_NODE, max_restarts=100,
    )  # fmt: skip
    yield fact(AllocationStarted, 0.0, allocation="a1", scheduler="slurm")
    world = BIG_NODES * PER_NODE
    yield fact(JobStarted, 1.0, spec=spec, world_size=world, allocation="a1", user="ann")
    step = 0
    for number in range(1, rounds + 1):
        yield from _big_round(fact, number)
        for i in range(reports):
            step += _STEPS_A_REPORT
            if i % 5 == 4:
                yield fact(
                    CheckpointCommitted, 1.0, round=number, step=step, tier="global",
                    path=f"s3://ckpt/{BIG}/{step}", size_bytes=1 << 42, shards=world,
                    world_size=world, lag_s=20.0, stall_s=0.2, write_s=18.0,
                )  # fmt: skip
            else:
                yield fact(
                    ProgressMade, 60.0, round=number, step=step, is_first=not i, node=node_name(0),
                    steps=_STEPS_A_REPORT, steps_s=60.0, step_p50_s=0.8,
                )  # fmt: skip
        if number < rounds:
            yield from _big_failure(fact, number, step)


def _big_round(fact: Any, number: int) -> Sequence[Fact]:
    members = tuple(
        Member(slot=slot, node=node_name(slot), first_rank=slot * PER_NODE, ranks=PER_NODE)
        for slot in range(BIG_NODES)
    )
    return [
        fact(
            RoundFormed, 2.0, round=number, members=members, cause="start" if number == 1 else
            "restart", world_size=BIG_NODES * PER_NODE, waited_s=2.0, allocation="a1",
        ),
        fact(
            RoundStarted, 8.0, round=number, start_s=8.0, master_address=node_name(0),
            master_port=29400, warm_ranks=BIG_NODES * PER_NODE, slowest_node=node_name(127),
        ),
    ]  # fmt: skip


def _big_failure(fact: Any, number: int, step: int) -> Sequence[Fact]:
    incident, slot = ids.new_id(), number * 7 % BIG_NODES
    about = {"incident": incident, "node": node_name(slot), "rank": slot * PER_NODE}
    reason = f"rank {slot * PER_NODE} on {node_name(slot)} was ended by SIGKILL"
    return [
        fact(
            IncidentOpened, 1.0, round=number, trigger="rank_exited", reason=reason, step=step,
            phase="step", **about,
        ),
        fact(
            RoundEnded, 0.1, round=number, cause="rank_exited", reason=reason, lasted_s=3600.0,
            last_step=step, **about,
        ),
        fact(
            IncidentClosed, 20.0, round=number, incident=incident, outcome="recovered",
            reason=reason, next_round=number + 1, reports=1, lost_steps=60, lost_s=50.0,
            ledger=Ledger(detect_s=0.1, evidence_s=0.3, decide_s=0.1, stop_s=1.0, rendezvous_s=2.0,
                          start_s=8.0, first_step_s=5.0),
        ),
    ]  # fmt: skip
