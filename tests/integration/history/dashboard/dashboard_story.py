"""A believable fleet for the dashboard: what its pages show in tests, in pictures and in guides."""

import asyncio
import base64
import itertools
import math
import random
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np

from everstep.bus.ports import Bus, Handler
from everstep.clock import SystemClock
from everstep.messages import (
    BlobRef,
    Budget,
    CheckpointPlace,
    CheckpointsLocated,
    CheckResult,
    CollectivesRead,
    ErrorRecord,
    Fact,
    HeatMapPart,
    JobSpec,
    Ledger,
    ListCheckpoints,
    Member,
    Message,
    NodeBeat,
    NodeRun,
    Option,
    Peer,
    ProbeBeat,
    RankBeat,
    RankScoreTable,
    Replacement,
    ReportedValue,
    ShowHeatMap,
    ShowTimings,
    StacksRead,
    TimingTable,
)
from everstep.messages.facts.incidents import Alternative, EvidenceItem
from everstep.messages.facts.stragglers import Score
from everstep.messages.questions.attribution import (
    CollectiveFault,
    FoldedStack,
    OpenCollective,
    Suspicion,
)
from everstep.messages.questions.catalog import ReplicaPlace
from everstep.messages.questions.straggler import GroupScores, RankScores, TimingRow
from everstep.messages.rank_logs import (
    LogHeader,
    LogIndex,
    LogPiece,
    LogStream,
    SentLogFile,
)
from everstep.observe.http import listen, serve_asgi, url_of
from everstep.store.database import open_database
from everstep.store.log import FactLog
from everstep.store.schema import upgrade
from everstep.store.times import to_us
from everstep_services.history.projections.fold import fold
from tests.integration.conftest import Api
from tests.unit.history.facts import KINDS, fact_id

JOB = "llama-70b-pretrain"
KILLED, STALLED = "0193b2f1c0de4f0a8c7d4b6e9f2010aa", "0193b2f1c0de4f0a8c7d4b6e9f2010bb"
OPEN = "0193b2f1c0de4f0a8c7d4b6e9f2010cc"
NODES, PER_NODE, _WINDOWS = 16, 8, 100
SECTIONS = ("data", "forward", "backward", "optimizer")
TRACEBACK = """Traceback (most recent call last):
  File "/home/ann/llama/train.py", line 412, in <module>
    main()
  File "/home/ann/llama/train.py", line 301, in main
    loss = step(batch)
  File "/home/ann/llama/train.py", line 188, in step
    loss.backward()
  File "/opt/venv/lib/python3.12/site-packages/torch/_tensor.py", line 648, in backward
    torch.autograd.backward(self, gradient, retain_graph, create_graph)
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity
of 79.11 GiB of which 1.12 GiB is free.
"""
TAIL = "".join(
    f"2026-11-25 17:0{i // 60}:{i % 60:02d} [rank21] step {48700 + i} loss 2.0{i % 10} "
    f"tokens/s 41{i % 7}02\n"
    for i in range(40)
)
TAIL += TRACEBACK


def node(number: int) -> str:
    """A node's name."""
    return f"gpu-{number:03d}"


class Story:
    """Facts that happened before `now`."""

    def __init__(self, now: datetime) -> None:
        self._now = now
        self.facts: list[Fact] = []

    def add(self, name: str, ago_s: float, job: str = JOB, /, **values: Any) -> Fact:
        """A fact that somebody sent this number of seconds ago."""
        at = self._now - timedelta(seconds=ago_s)
        source = values.pop("source", "rendezvous")
        fact = KINDS[name](id=fact_id(), job=job, at=at, source=source, **values)
        assert isinstance(fact, Fact)
        self.facts.append(fact)
        return fact

    def in_order(self) -> Sequence[Fact]:
        """As they came."""
        return sorted(self.facts, key=lambda fact: fact.at)


def facts(now: datetime, blob: BlobRef | None) -> Sequence[Fact]:
    """The whole fleet."""
    story = Story(now)
    _nodes(story)
    _main_job(story, blob)
    for number, (name, state, user, nodes, age_h) in enumerate(_OTHERS):
        _other_job(story, number, name, state, user, nodes, age_h)
    return story.in_order()


_OTHERS = (
    ("vit-h-distill", "running", "mia", 4, 30.0),
    ("moe-8x7b-sft", "running", "ann", 8, 11.0),
    ("whisper-v4-ablation-17", "done", "noor", 2, 20.0),
    ("whisper-v4-ablation-18", "done", "noor", 2, 15.0),
    ("diffusion-xl-512", "failed", "kai", 4, 6.0),
    ("reward-model-2", "stopped", "mia", 2, 9.0),
    ("embedding-small", "running", "noor", 1, 2.0),
    ("eval-sweep", "waiting", "kai", 4, 0.1),
)


def _spec(name: str, nodes: int, **labels: str) -> JobSpec:
    return JobSpec(
        name=name, labels=labels, command=("torchrun-compatible", "train.py", "--config", f"{name}.yaml"),
        config_fingerprint="9f2c51aa73b0", nodes_min=nodes, nodes_max=nodes,
        ranks_per_node=PER_NODE, spares=1, max_restarts=20, max_restarts_per_hour=4,
    )  # fmt: skip


def _begin(story: Story, job: str, nodes: int, ago_s: float, user: str, **labels: str) -> None:
    story.add("allocation_started", ago_s, job, allocation="a1", scheduler="slurm",
              scheduler_job="4711", nodes=tuple(node(i) for i in range(nodes)))  # fmt: skip
    story.add("job_started", ago_s - 1, job, spec=_spec(job, nodes, **labels), world_size=nodes * PER_NODE,
              allocation="a1", user=user)  # fmt: skip


def _round(story: Story, job: str, number: int, nodes: int, ago_s: float, **more: Any) -> None:
    first = more.pop("first_node", 0)
    members = tuple(
        Member(slot=slot, node=more.get("swap", {}).get(slot, node(first + slot)),
               first_rank=slot * PER_NODE, ranks=PER_NODE)
        for slot in range(nodes)
    )  # fmt: skip
    more.pop("swap", None)
    cause = more.pop("cause", "start" if number == 1 else "restart")
    story.add("round_formed", ago_s, job, round=number, members=members, cause=cause,
              world_size=nodes * PER_NODE, waited_s=2.1, allocation="a1", **more)  # fmt: skip
    story.add("round_started", ago_s - 9, job, round=number, start_s=8.4, master_address=members[0].node,
              master_port=29400 + number, warm_ranks=nodes * PER_NODE, slowest_node=members[-1].node)  # fmt: skip


def _steps(story: Story, job: str, number: int, began_s: float, ended_s: float, first: int,
           each_s: float, lost: int = 0) -> int:  # fmt: skip
    """Progress between two ages; the last step."""
    chance = random.Random(number)
    step, ago = first, began_s
    story.add("progress_made", ago, job, round=number, step=step, node=node(0), is_first=True,
              lost_steps=lost, source=f"agent/{node(0)}")  # fmt: skip
    every = max(60.0, (began_s - ended_s) / 150)
    while ago - every > ended_s:
        ago -= every
        wave = 1 + 0.04 * math.sin(ago / 900) + chance.uniform(-0.015, 0.03)
        slow = 1.13 if number == 3 and ago < 1500 else 1.0
        took = each_s * wave * slow
        count = int(every / took)
        step += count
        story.add("progress_made", ago, job, round=number, step=step, node=node(0), steps=count,
                  steps_s=every, step_p50_s=round(took, 4), step_p99_s=round(took * 1.09, 4),
                  step_max_s=round(took * chance.uniform(1.1, 1.4), 4), total_steps=100_000,
                  values=_values(step, took, chance), source=f"agent/{node(0)}")  # fmt: skip
    return step


def _values(step: int, took_s: float, chance: random.Random) -> tuple[ReportedValue, ...]:
    told = {
        "grad_norm": round(0.7 + chance.uniform(-0.1, 0.15), 3),
        "loss": round(1.9 + 40_000 / step + chance.uniform(-0.02, 0.02), 4),
        "tokens_per_s": round(3.3e6 / took_s),
    }
    return tuple(ReportedValue(name=name, value=value) for name, value in told.items())


def _saves(story: Story, job: str, number: int, began_s: float, ended_s: float, first: int,
           each_s: float, nodes: int) -> None:  # fmt: skip
    ago = began_s - 1200
    while ago > ended_s:
        step = first + int((began_s - ago) / each_s)
        for tier, size in (("memory", 140 << 30), ("peer", 140 << 30), ("global", 140 << 30)):
            if tier != "global" and ago - ended_s > 2500:
                continue
            story.add("checkpoint_committed", ago - (0 if tier == "memory" else 20), job, round=number,
                      step=step, tier=tier, path=f"s3://ckpt/{job}/step-{step}" if tier == "global" else "",
                      size_bytes=size, shards=nodes * PER_NODE, world_size=nodes * PER_NODE, manifest_hash="ab" * 16,
                      lag_s=18.0, stall_s=0.21, write_s=17.2, source=f"agent/{node(0)}")  # fmt: skip
        ago -= 1200


def _main_job(story: Story, blob: BlobRef | None) -> None:
    """Six hours: a rank runs out of memory, another one hangs, a third is slow now."""
    _begin(story, JOB, NODES, 21_600, "ann", team="llm", cluster="h100-a")
    _round(story, JOB, 1, NODES, 21_500)
    _saves(story, JOB, 1, 21_440, 14_400, 40_000, 0.8, NODES)
    last = _steps(story, JOB, 1, 21_440, 14_400, 40_000, 0.8)
    _killed(story, 14_395, last, blob)
    replaced = (
        Replacement(slot=2, node=node(16), was=node(2), reason="its rank failed, a spare is warm"),
    )
    _round(story, JOB, 2, NODES, 14_384, swap={2: node(16)}, incident=KILLED, restarts=1,
           replaced=replaced)  # fmt: skip
    _saves(story, JOB, 2, 14_352, 5_400, last - 700, 0.8, NODES)
    last = _steps(story, JOB, 2, 14_352, 5_400, last - 700, 0.8, lost=700)
    _stalled(story, 5_100, last)
    _round(story, JOB, 3, NODES, 5_060, swap={2: node(16)}, incident=STALLED, restarts=2)
    _saves(story, JOB, 3, 5_010, 30, last - 375, 0.8, NODES)
    _steps(story, JOB, 3, 5_010, 20, last - 375, 0.8, lost=375)
    _slow(story)


def _killed(story: Story, ago: float, step: int, blob: BlobRef | None) -> None:
    reason = f"rank 21 on {node(2)} ended with exit code 1: torch.OutOfMemoryError at train.py:188"
    error = ErrorRecord(name="torch.OutOfMemoryError", text="CUDA out of memory. Tried to allocate 2.00 GiB",
                        traceback=TRACEBACK, place="train.py:188 in step", chain=("RuntimeError",))  # fmt: skip
    about: dict[str, Any] = {"incident": KILLED, "node": node(2), "rank": 21}
    first = story.add("rank_exited", ago, round=1, node=node(2), slot=2, rank=21, local_rank=5, pid=4021, how="error",
                      lasted_s=7040.0, exit_code=1, error=error, log=blob, step=step, section="backward",
                      source=f"agent/{node(2)}")  # fmt: skip
    for rank in (20, 22, 23):
        story.add("rank_exited", ago - 0.4, round=1, node=node(2), slot=2, rank=rank, local_rank=rank % 8, pid=4000 + rank,
                  how="signal", lasted_s=7040.0, signal="SIGABRT", step=step, source=f"agent/{node(2)}")  # fmt: skip
    story.add("incident_opened", ago - 0.02, round=1, trigger="rank_exited", reason=reason, trigger_fact=first.id,
              step=step, phase="step", section="backward", **about)  # fmt: skip
    story.add("round_ended", ago - 0.02, round=1, cause="rank_exited", reason=reason, lasted_s=7105.0, last_step=step,
              trigger=first.id, **about)  # fmt: skip
    story.add("evidence_collected", ago - 0.4, round=1, evidence="stderr", blob=blob, summary="CUDA out of memory",
              source=f"agent/{node(2)}", **about)  # fmt: skip
    for where in (node(2), node(0)):
        story.add("evidence_collected", ago - 0.6, round=1, incident=KILLED, node=where, evidence="stacks", blob=blob,
                  summary="stacks of 8 ranks", source=f"agent/{where}")  # fmt: skip
        story.add("evidence_collected", ago - 0.7, round=1, incident=KILLED, node=where, evidence="flight_recorder", blob=blob,
                  summary="dumps of 8 ranks", source=f"agent/{where}")  # fmt: skip
    story.add("evidence_collected", ago - 0.5, round=1, evidence="kernel_log", missing="nothing new was in it",
              source=f"agent/{node(2)}", **about)  # fmt: skip
    decision = story.add(
        "action_decided", ago - 0.9, round=1, action="restart", rule="restart.budget_left", incident=KILLED,
        reason="1 of 20 restarts used, 1 of 4 in this hour; 8 880 steps were made in round 1",
        considered=(Option(action="stop", rejected="first failure with this fingerprint, 2 are needed"),
                    Option(action="wait", rejected=f"a spare is warm: {node(16)}")),
        budgets=(Budget(name="restarts", limit=20, left=19), Budget(name="restarts_per_hour", limit=4, left=3)),
        nodes_out=(node(2),), nodes_in=(node(16),), took_s=0.3,
    )  # fmt: skip
    story.add("action_taken", ago - 10, round=1, decision=decision.id, action="restart", outcome="done",
              reason="round 2 runs", incident=KILLED, took_s=9.0)  # fmt: skip
    story.add("incident_closed", ago - 45, round=2, incident=KILLED, outcome="recovered",
              reason=f"rank 21 on {node(2)} ran out of memory; {node(16)} took its slot, and training went on",
              ledger=Ledger(detect_s=0.02, evidence_s=1.1, decide_s=0.31, stop_s=3.2, rendezvous_s=2.1, start_s=8.4,
                            restore_s=21.5, first_step_s=6.4),
              lost_steps=700, lost_s=560.0, restored_step=step - 700, restored_tier="peer", next_round=2, reports=4)  # fmt: skip
    story.add("verdict_reached", ago - 8, round=1, incident=KILLED, cause="user_code", kind="out_of_memory", confidence=0.94,
              reason=f"Rank 21 on {node(2)} ran out of device memory in the backward pass; three ranks aborted because of it.",
              culprit_ranks=(21,), culprit_nodes=(node(2),), source="attribution",
              evidence=(EvidenceItem(says="rank 21 raised torch.OutOfMemoryError 0.4 s before any other rank failed", analyzer="exits", weight=3.2),
                        EvidenceItem(says="its log ends with: CUDA out of memory. Tried to allocate 2.00 GiB", analyzer="logs", weight=2.4),
                        EvidenceItem(says="rank 21 never joined all_reduce 1204 of group dp; 127 ranks wait in it", analyzer="flight_recorder", weight=1.9)),
              alternatives=(Alternative(cause="gpu", confidence=0.04, reason="no XID and no ECC error was in the kernel log"),),
              missing=("kernel_log: nothing new was in it",),
              advice="Lower the micro-batch of this job, or shard activations: 1.12 GiB was free where 2 GiB were asked for.",
              is_transient=False, fingerprint="oom:train.py:188", analyzers=("exits", "logs", "flight_recorder", "stacks"), took_s=0.8)  # fmt: skip


def _stalled(story: Story, ago: float, step: int) -> None:
    reason = f"rank 77 on {node(9)} made no progress for 300 s in section data (limit 120 s)"
    first = story.add("rank_stalled", ago, round=2, node=node(9), slot=9, rank=77, local_rank=5, waited_s=300.0, limit_s=120.0,
                      limit_source="learned", phase="section", section="data", step=step,
                      blocked_in="it reads a file of /mnt/data (nfs4_wait_bit_killable)", is_fatal=True,
                      source=f"agent/{node(9)}")  # fmt: skip
    about: dict[str, Any] = {"incident": STALLED, "node": node(9), "rank": 77}
    story.add("incident_opened", ago - 0.1, round=2, trigger="rank_stalled", reason=reason, trigger_fact=first.id, step=step,
              phase="section", section="data",
              last_progress_at=story._now - timedelta(seconds=ago + 300), **about)  # fmt: skip
    story.add("stall_located", ago - 0.5, round=2, first_ranks=(77,), nodes=(node(9),), waiting_ranks=127, section="data",
              lead_s=4.2, is_certain=True, source="health",
              reason=f"rank 77 on {node(9)} stopped 4.2 s before all others, which wait for it in backward")  # fmt: skip
    story.add(
        "round_ended",
        ago - 1,
        round=2,
        cause="rank_stalled",
        reason=reason,
        lasted_s=9280.0,
        last_step=step,
        **about,
    )
    story.add("verdict_reached", ago - 6, round=2, incident=STALLED, cause="storage", kind="slow_storage", confidence=0.81,
              reason=f"Rank 77 on {node(9)} waited for a file of /mnt/data; all others waited for it.",
              culprit_ranks=(77,), culprit_nodes=(node(9),), source="attribution",
              evidence=(EvidenceItem(says="its process was in uninterruptible sleep in nfs4_wait_bit_killable", analyzer="stacks", weight=2.8),),
              alternatives=(Alternative(cause="network", confidence=0.12, reason="the file system is reached over the network"),),
              advice="Look at the mount /mnt/data on that node.", is_transient=True, analyzers=("stacks", "health"))  # fmt: skip
    story.add("incident_closed", ago - 90, round=3, incident=STALLED, outcome="recovered",
              reason=f"rank 77 on {node(9)} hung in section data; training went on after a restart",
              ledger=Ledger(detect_s=300.0, evidence_s=2.4, decide_s=0.3, stop_s=30.0, rendezvous_s=2.0, start_s=8.2,
                            restore_s=30.1, first_step_s=6.9),
              lost_steps=375, lost_s=300.0, restored_step=step - 375, restored_tier="global", next_round=3, reports=1)  # fmt: skip


def _slow(story: Story) -> None:
    own = Score(signal="own", relative_score=0.82, value_s=0.44, reference_s=0.36)
    old = story.add("straggler_found", 9_000, round=2, node=node(4), slot=4, rank=33, cause="input", role="all", section="data",
                    reason="its own time was 24 % above the median of its group for 4 windows", scores=(own,), lateness_s=0.04,
                    slowdown_ratio=0.05, windows=4, confidence=0.74, failure_class="tune", source="straggler")  # fmt: skip
    story.add("straggler_cleared", 8_100, round=2, node=node(4), rank=33, finding=old.id, lasted_s=900.0, lost_s=41.0,
              reason="2 % above the median", source="straggler")  # fmt: skip
    found = story.add("straggler_found", 1_400, round=3, node=node(11), slot=11, rank=93, cause="device", role="all",
                      section="backward", reason="its own time is 31 % above the median of its group for 6 windows; the device's clock is capped",
                      scores=(Score(signal="own", relative_score=0.76, value_s=0.47, reference_s=0.36),), lateness_s=0.09,
                      slowdown_ratio=0.13, windows=6, confidence=0.88, failure_class="replace", source="straggler")  # fmt: skip
    story.add("straggler_acted", 1_300, round=3, node=node(11), rank=93, finding=found.id, action="exclude", outcome="observed",
              reason="the mode of exclude is observe", source="straggler")  # fmt: skip
    story.add("step_time_shifted", 1_380, round=3, before_s=0.80, now_s=0.90, step=57_000, section="backward",
              reason="the median step became 13 % longer", source="straggler")  # fmt: skip


_CHECKS = ("gpu_memory", "nvlink", "ecc", "xid", "pcie", "nic", "clock", "disk", "memory", "nfs")


def _nodes(story: Story) -> None:
    for number in range(20):
        name = node(number)
        story.add("node_joined", 21_590 - number, node=name, allocation="a1", ranks=PER_NODE, address=f"10.4.0.{number + 10}",
                  device="NVIDIA H100 80GB HBM3", version="0.9.0", topology=("row-2", f"rack-{number // 8}"),
                  failure_domain=f"rack-{number // 8}", source=f"agent/{name}")  # fmt: skip
        results = [
            CheckResult(check=check, state="ok", took_s=0.2 + number / 100) for check in _CHECKS
        ]
        if number == 18:
            results[2] = CheckResult(check="ecc", state="failed", reason="14 uncorrectable ECC errors since boot, 0 allowed", subject="GPU 3",
                                     failure_class="replace", code="ECC_DBE", took_s=0.3)  # fmt: skip
        if number in {4, 11}:
            results[6] = CheckResult(
                check="clock",
                state="warning",
                reason="SM clock capped at 1 200 MHz: thermal",
                subject="GPU 5",
                took_s=0.2,
            )
        if number in {7, 13}:
            results[1] = CheckResult(
                check="nvlink", state="unsupported", reason="no NVLink on this board", took_s=0.0
            )
        story.add("node_check_finished", 21_000 - number * 30, node=name, occasion="join", is_healthy=number != 18, took_s=2.4,
                  results=tuple(results), checks=_CHECKS, source=f"agent/{name}")  # fmt: skip
    story.add("node_suspected", 1_350, node=node(11), cause="straggler", reason="rank 93 was slow in 6 windows: the device's clock is capped",
              strikes=2, strikes_limit=3, source="health")  # fmt: skip
    story.add("node_excluded", 20_000, "_cluster", node=node(18), by="health", reason="ECC errors on GPU 3", ttl_s=86_400.0, mode="enforce",
              source="health")  # fmt: skip


def _other_job(
    story: Story, number: int, name: str, state: str, user: str, nodes: int, age_h: float
) -> None:
    began, first = age_h * 3600, 30 + number * 8
    _begin(story, name, nodes, began, user, team=("vision", "llm", "audio")[number % 3])
    if state == "waiting":
        story.add(
            "round_waiting",
            300,
            name,
            round=1,
            joined=3,
            needed=4,
            waited_s=60.0,
            limit_s=600.0,
            reason="3 of 4 nodes have joined",
        )
        return
    _round(story, name, 1, nodes, began - 20, first_node=first)
    ended = 25.0 if state == "running" else began * 0.45
    last = _steps(story, name, 1, began - 60, ended, 1, 0.4 + number / 10)
    _saves(story, name, 1, began - 60, ended, 1, 0.4 + number / 10, nodes)
    if state == "running":
        return
    reasons = {
        "done": "all ranks have finished",
        "stopped": "mia asked: wrong data set",
        "failed": "the same failure twice: RuntimeError at train.py:77",
    }
    if state == "failed":
        _failed(story, name, ended, last, first)
    story.add("job_ended", ended - 5, name, state=state, exit_code=0 if state == "done" else 1, reason=reasons[state],
              last_step=last, rounds=1, incident=OPEN if state == "failed" else None)  # fmt: skip


def _failed(story: Story, job: str, ago: float, step: int, first: int) -> None:
    where, reason = (
        node(first + 1),
        "rank 9 raised RuntimeError: expected all tensors on one device",
    )
    about: dict[str, Any] = {"incident": OPEN, "node": where, "rank": 9}
    error = ErrorRecord(name="RuntimeError", text="expected all tensors on one device", place="train.py:77 in forward",
                        traceback="Traceback (most recent call last):\n  File \"train.py\", line 77, in forward\nRuntimeError")  # fmt: skip
    story.add("rank_exited", ago, job, round=1, node=where, slot=1, rank=9, local_rank=1, pid=99, how="error", lasted_s=4000.0,
              exit_code=1, error=error, step=step, source=f"agent/{where}")  # fmt: skip
    story.add(
        "incident_opened",
        ago - 0.1,
        job,
        round=1,
        trigger="rank_exited",
        reason=reason,
        step=step,
        phase="step",
        **about,
    )
    story.add(
        "round_ended",
        ago - 0.1,
        job,
        round=1,
        cause="rank_exited",
        reason=reason,
        lasted_s=4000.0,
        last_step=step,
        **about,
    )
    story.add("verdict_reached", ago - 3, job, round=1, incident=OPEN, cause="user_code", kind="python_exception", confidence=0.97,
              reason="Rank 9 raised RuntimeError in train.py:77, as in the round before.", culprit_ranks=(9,), culprit_nodes=(where,),
              source="attribution", advice="Fix train.py:77.", evidence=(EvidenceItem(says="the exception is the same as before", analyzer="exits", weight=3.0),))  # fmt: skip
    story.add("incident_closed", ago - 4, job, round=1, incident=OPEN, outcome="failed", reason=reason, reports=1,
              ledger=Ledger(detect_s=0.1, evidence_s=0.9, decide_s=0.2, stop_s=2.0, rendezvous_s=0.0, start_s=0.0, first_step_s=0.0))  # fmt: skip


def beats(now: datetime) -> Iterator[NodeBeat]:
    """What the agents of the job say now."""
    for slot in range(NODES):
        name = node(16) if slot == 2 else node(slot)
        ranks = tuple(
            RankBeat(rank=slot * PER_NODE + local, state="running", step=57_800 - (slot % 3 == 0),
                     progress_age_s=0.2 + local / 20, section=SECTIONS[(slot + local) % 4], section_age_s=0.1 + local / 30,
                     limit_s=12.5, limit_source="learned", resident_bytes=22 << 30, device_bytes=71 << 30)
            for local in range(PER_NODE)
        )  # fmt: skip
        yield NodeBeat(
            job=JOB,
            node=name,
            sequence=100,
            at=now,
            state="running",
            round=3,
            slot=slot,
            ranks=ranks,
            watch="armed",
            probes=(
                ProbeBeat(check="gpu", every_s=30.0, policy="observe", state="ok", failures_limit=3),
                ProbeBeat(check="nic", every_s=10.0, policy="exclude", state="failed", failures=2, failures_limit=3),
            ),
        )  # fmt: skip


class Services:
    """What straggler, catalog and attribution would answer."""

    def __init__(self, now: datetime, ranks: int = NODES * PER_NODE) -> None:
        self._now = now
        self._ranks = ranks
        self._chance = random.Random(7)
        self._table = [self._values(rank, _WINDOWS) for rank in range(ranks)]

    async def scores(self, _question: Message) -> Message:
        """The slowest ranks."""
        ranks = tuple(
            RankScores(rank=rank, node=node(rank // PER_NODE), role="all", is_straggler=rank == 93,
                       own_s=own, slower_ratio=own / 0.36 - 1, lateness_s=max(0.0, own - 0.37), waited_s=max(0.0, 0.47 - own),
                       scores=(Score(signal="own", relative_score=0.36 / own, value_s=own, reference_s=0.36),))
            for rank, own in ((93, 0.472), (33, 0.391), (12, 0.377), (71, 0.371), (5, 0.369), (101, 0.367), (64, 0.366), (88, 0.365))
        )  # fmt: skip
        return RankScoreTable(round=3, window=57_776, ranks=ranks, ranks_seen=NODES * PER_NODE, slowdown_ratio=0.13,
                              groups=(GroupScores(group="dp", ranks=16, last_rank=93, last_ratio=0.91, waited_s=0.1),
                                      GroupScores(group="tp11", ranks=8, last_rank=93, last_ratio=0.97, waited_s=0.09)),
                              step_s=0.9, clock_error_s=0.0004, window_steps=16)  # fmt: skip

    async def timings(self, question: Message) -> Message:
        """A table with one slow rank, one slow node for a while, and some gaps."""
        assert isinstance(question, ShowTimings)
        windows = tuple((57_000 + 16 * i, 57_015 + 16 * i) for i in range(_WINDOWS))[
            -question.most_windows :
        ]
        end = min(self._ranks, question.first_rank + question.most_ranks)
        rows = tuple(
            TimingRow(
                rank=rank,
                node=node(rank // PER_NODE),
                role="all",
                values=self._table[rank][-len(windows) :],
            )
            for rank in range(question.first_rank, end)
        )
        return TimingTable(round=3, measure=question.measure, windows=windows, rows=rows, next_rank=end if end < self._ranks else None,
                           sections=("", *SECTIONS))  # fmt: skip

    async def heat_map(self, question: Message) -> Message:
        """The same table as a picture."""
        assert isinstance(question, ShowHeatMap)
        most = question.most_windows
        asked = ShowTimings(job=question.job, measure=question.measure, section=question.section,
                            most_ranks=self._ranks, most_windows=most)  # fmt: skip
        table = await self.timings(asked)
        assert isinstance(table, TimingTable)
        values = np.array([row.values for row in table.rows], np.float64)
        low, high = float(np.nanmin(values)), float(np.nanmax(values))
        cells = (
            np.nan_to_num((values - low) / (high - low) * 65_534 + 1, nan=0).round().astype("<u2")
        )
        return HeatMapPart(round=3, measure=question.measure, windows=table.windows, first_rank=0, low=low, high=high,
                           nodes=tuple(NodeRun(node=node(i), ranks=PER_NODE) for i in range(self._ranks // PER_NODE)),
                           cells=base64.b64encode(cells.tobytes()).decode(), sections=table.sections)  # fmt: skip

    def _values(self, rank: int, windows: int) -> tuple[float | None, ...]:
        base = 0.355 + (rank % PER_NODE) * 0.002 + self._chance.uniform(0, 0.006)
        values: list[float | None] = [
            round(base + self._chance.gauss(0, 0.004), 5) for _ in range(windows)
        ]
        for i in range(windows):
            if rank % 128 == 93 and i > windows * 0.62:
                values[i] = 0.47 + self._chance.gauss(0, 0.006)
            if rank % 128 // PER_NODE == 4 and windows * 0.2 < i < windows * 0.35:
                values[i] = 0.41 + self._chance.gauss(0, 0.01)
            if rank % 128 in {40, 41} and i < windows * 0.08:
                values[i] = None
        return tuple(values)

    async def listed(self, question: Message) -> Message:
        """Checkpoints in three tiers."""
        places = []
        for i in range(12):
            step, saved = 57_500 - i * 1500, self._now - timedelta(minutes=4 + 20 * i)
            common: dict[str, Any] = {
                "step": step,
                "saved_at": saved,
                "size_bytes": 140 << 30,
                "shards": 128,
                "world_size": 128,
                "round": 3,
            }
            if i < 2:
                holders = tuple(
                    ReplicaPlace(
                        slot=slot,
                        holders=tuple(
                            Peer(
                                node=node((slot + k) % NODES),
                                slot=(slot + k) % NODES,
                                address="10.4.0.9",
                                port=7100,
                            )
                            for k in (1, 2)
                        ),
                    )
                    for slot in range(NODES)
                )
                places.append(
                    CheckpointPlace(tier="memory", path="", survivable_losses=0, **common)
                )
                places.append(
                    CheckpointPlace(
                        tier="peer", path="", survivable_losses=2, replicas=holders, **common
                    )
                )
            places.append(CheckpointPlace(tier="global", path=f"s3://ckpt/{JOB}/step-{step}", is_verified=i not in {0, 5},
                                          verified_at=saved + timedelta(minutes=2), is_pinned=i == 6, is_quarantined=i == 5,
                                          note="shard 41 has another hash than its manifest" if i == 5 else "", **common))  # fmt: skip
        assert isinstance(question, ListCheckpoints)
        wanted = [one for one in places if question.tier in {"", one.tier}]
        return CheckpointsLocated(places=tuple(wanted))

    async def collectives(self, _question: Message) -> Message:
        """One rank never joined."""
        others = tuple(rank for rank in range(16, 48) if rank != 21)
        return CollectivesRead(
            verdict="fault", summary="Rank 21 never joined all_reduce 1204 of group dp, in which 127 ranks wait.", ranks=128, dumps=127,
            faults=(CollectiveFault(kind="missing_rank", summary="127 ranks wait for rank 21 in all_reduce", confidence=0.93,
                                    suspects=(Suspicion(rank=21, reason="it never joined"),), waiting=others),),
            collectives=(OpenCollective(group="dp", sequence=1204, operation="all_reduce", where="train.py:188", age_s=2.1,
                                        never_joined=(21,), started=others),
                         OpenCollective(group="tp2", sequence=88_120, operation="all_gather", where="train.py:150",
                                        never_joined=(21,), started=(16, 17, 18, 19), scheduled=(20, 22, 23)),
                         OpenCollective(group="dp", sequence=1203, operation="reduce_scatter", where="train.py:188",
                                        completed=(*others, 21))),
            without_dump=(21,))  # fmt: skip

    async def stacks(self, _question: Message) -> Message:
        """All but one wait."""
        return StacksRead(
            verdict="odd", summary="1 rank stands elsewhere: rank 21, in the allocator.", confidence=0.9, ranks=128,
            suspects=(Suspicion(rank=21, reason="it stands elsewhere"),), waiting=tuple(r for r in range(128) if r != 21),
            stacks=(FoldedStack(ranks=(21,), thread="MainThread", does="raises an exception",
                                frames=("main (train.py:301)", "step (train.py:188)", "backward (torch/_tensor.py:648)", "malloc (CUDACachingAllocator)")),
                    FoldedStack(ranks=tuple(r for r in range(128) if r != 21), thread="MainThread", does="waits in all_reduce",
                                frames=("main (train.py:301)", "step (train.py:188)", "backward (torch/_tensor.py:648)", "all_reduce (torch/distributed)"))))  # fmt: skip


@asynccontextmanager
async def answering(bus: Bus, now: datetime, ranks: int = NODES * PER_NODE) -> AsyncIterator[None]:
    """With services that answer what pages ask."""
    services = Services(now, ranks)
    parts: Mapping[str, Mapping[str, Handler]] = {
        "straggler": {
            "scores": services.scores,
            "timings": services.timings,
            "heat_map": services.heat_map,
        },
        "catalog": {"list": services.listed},
        "attribution": {"collectives": services.collectives, "stacks": services.stacks},
    }
    async with AsyncExitStack() as opened:
        for name, verbs in parts.items():
            await opened.enter_async_context(bus.answer(name, verbs))
        yield


LOG_ROUND = 3
_LOG_LINES = 40
_HOSTILE_LINE = (
    "\x1b]0;title\x07\x1b[2J<script>alert('log')</script> \x1b[8mhidden\x1b[0m \u202egnp.exe"
)


def _log_lines(rank: int) -> Iterator[str]:
    for number in range(_LOG_LINES):
        step = 57_460 + number
        text = (
            f"step {step} loss {1.93 + math.sin(step + rank) / 50:.4f} tokens/s {4100 + step % 70}"
        )
        yield f"[\x1b[32mINFO\x1b[0m] {text}" if number % 8 == rank % 8 else text
    if rank == 0:
        yield "\x1b[1;33mWARNING\x1b[0m: the learning rate is \x1b[36m0\x1b[0m since step 57 490"
        yield _HOSTILE_LINE


async def fill_logs(api: Api, now: datetime) -> None:
    """The output of two nodes of the newest round in the log store."""
    for rank in range(2 * PER_NODE):
        where, file = node(rank // PER_NODE), f"f{rank}"
        texts: dict[LogStream, list[str]] = {"stdout": list(_log_lines(rank))}
        if rank == 5:
            texts["stderr"] = ["train.py:188: \x1b[31mUserWarning\x1b[0m: a gradient has 3 NaN"]
        files = []
        for stream, lines in texts.items():
            late_us = 38_000_000 if stream == "stderr" else 0
            began = to_us(now) - 42_000_000 + rank * 7_000 + late_us
            times = tuple((at + 1, began + at * 1_000_000) for at in range(len(lines)))
            data = "".join(f"{line}\n" for line in lines).encode()
            await put_output(
                api,
                stream,
                rank,
                data,
                LogHeader(file=file + stream, offset=0, size=len(data), line=0, times=times),
            )
            files.append(SentLogFile(rank=rank, stream=stream, file=file + stream, size=len(data), sent=len(data), lines=len(lines),
                                     first_us=began, last_us=times[-1][1], is_over=False))  # fmt: skip
        index = await api.bus.rank_logs.indexes(JOB, LOG_ROUND)
        older = next((one.files for one in index if one.node == where), ())
        await api.bus.rank_logs.put_index(
            LogIndex(job=JOB, round=LOG_ROUND, node=where, at_us=to_us(now), files=(*older, *files))
        )


async def put_output(
    api: Api, stream: LogStream, rank: int, data: bytes, header: LogHeader
) -> None:
    """A piece of what a rank has written."""
    piece = LogPiece(job=JOB, round=LOG_ROUND, node=node(rank // PER_NODE), rank=rank,
                     stream=stream, header=header, data=data)  # fmt: skip
    await api.bus.rank_logs.put(piece)


async def fill(api: Api, now: datetime) -> None:
    """The record, and what agents say now."""
    await fill_logs(api, now)
    blob = await api.bus.blobs.put(JOB, TAIL.encode())
    told = facts(now, blob)
    for start in range(0, len(told), 2000):
        await api.add(*told[start : start + 2000])
    for beat in beats(now):
        api.context.beats.hear(beat)


@asynccontextmanager
async def opened(
    folder: Path, ranks: int = NODES * PER_NODE, *, is_empty: bool = False
) -> AsyncIterator[Api]:
    """The interface over a database with the fleet in it."""
    now = datetime.now(UTC)
    async with open_database(f"sqlite:///{folder / 'dashboard.db'}") as database:
        await upgrade(database)
        api = Api(database, FactLog(database, fold), SystemClock())
        await api.open()
        if not is_empty:
            await fill(api, now)
        async with answering(api.bus, now, ranks):
            yield api


async def _beat(api: Api) -> None:
    for number in itertools.count(_LOG_LINES + 2):
        text = f"step {57_460 + number} \x1b[32mloss\x1b[0m <b>{number}</b>\n".encode()
        at_us = to_us(datetime.now(UTC))
        header = LogHeader(
            file="f0stdout", offset=number * 1000, size=len(text), line=number, times=((1, at_us),)
        )
        await put_output(api, "stdout", 0, text, header)
        for beat in beats(datetime.now(UTC)):
            api.context.beats.hear(beat)
        await api.clock.sleep(1)


async def _serve(folder: Path, port: int, *, is_empty: bool, ranks: int) -> None:
    async with opened(folder, ranks, is_empty=is_empty) as api:
        listener = listen("127.0.0.1", port, remedy="name another port")
        token = await api.token("admin")
        sys.stdout.write(f"{url_of(listener)}  token {token}\n")
        sys.stdout.flush()
        async with asyncio.TaskGroup() as tasks:
            if not is_empty:
                tasks.create_task(_beat(api))
            tasks.create_task(serve_asgi(api.app, listener, asyncio.Event(), drain_within_s=0.5))


def main(folder: str, port: str, *more: str) -> None:
    """`python -m tests.integration.history.dashboard.dashboard_story FOLDER PORT [--empty] [RANKS]`."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    ranks = next((int(word) for word in more if word.isdecimal()), NODES * PER_NODE)
    asyncio.run(_serve(Path(folder), int(port), is_empty="--empty" in more, ranks=ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
