"""The facts of a believable fleet, as the dashboard shows it in tests, pictures and guides."""

import math
import random
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from everstep.messages import (
    BlobRef,
    Budget,
    CheckResult,
    ComparedResult,
    ErrorRecord,
    Fact,
    JobSpec,
    Ledger,
    Member,
    Option,
    Replacement,
    ReportedValue,
)
from everstep.messages.facts.incidents import Alternative, EvidenceItem
from everstep.messages.facts.stragglers import Score
from tests.unit.history.facts import KINDS, fact_id

JOB = "llama-70b-pretrain"
KILLED, STALLED = "0193b2f1c0de4f0a8c7d4b6e9f2010aa", "0193b2f1c0de4f0a8c7d4b6e9f2010bb"
OPEN = "0193b2f1c0de4f0a8c7d4b6e9f2010cc"
UNRIGHT, UNRIGHT_JOB = "0193b2f1c0de4f0a8c7d4b6e9f2010dd", "vit-h-distill"
NODES, PER_NODE, WINDOWS = 16, 8, 100
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
                  values=_values(step, took, chance, has_bands=job == UNRIGHT_JOB), source=f"agent/{node(0)}")  # fmt: skip
    return step


def _values(
    step: int, took_s: float, chance: random.Random, *, has_bands: bool = False
) -> tuple[ReportedValue, ...]:
    told = {
        "grad_norm": round(0.7 + chance.uniform(-0.1, 0.15), 3),
        "loss": round(1.9 + 40_000 / step + chance.uniform(-0.02, 0.02), 4),
        "tokens_per_s": round(3.3e6 / took_s),
    }
    if has_bands:
        smooth = 1.9 + 40_000 / step
        told |= {"loss_low": smooth * 0.9, "loss_high": smooth * 1.12,
                 "grad_norm_low": 0.45, "grad_norm_high": 1.05}  # fmt: skip
    return tuple(ReportedValue(name=name, value=value) for name, value in told.items())


def _numerics(story: Story, job: str, began_s: float) -> None:
    """A bit that flips once, a bad batch, and a device that computes wrongly each time."""
    told = (
        (0.75, "1a", "nan", "transient", ("again",), "the result of rank 5 on gpu-000 (GPU-5e9c) was not reproduced: "
         "loss nan, again 2.41 and 2.41"),
        (0.5, "2b", "loss_spike", "correct_but_unexpected", ("skip",), "each computation here and on another device gave "
         "the same result: rank 9 has loss 9.5, again 9.5 and 9.5, elsewhere 9.5"),
        (0.2, "3c", "grad_norm_spike", "persistent", ("rollback", "exclude"), "rank 11 on gpu-001 (GPU-77aa) computes "
         "something else than another device does: rank 11 has loss 9.5, again 9.5 and 9.5, elsewhere 2.4 (rank 3)"),
    )  # fmt: skip
    for part, case, signal, kind, acts, reason in told:
        ago, step = began_s * part, int(began_s * (1 - part) / 0.4)
        of: dict[str, Any] = {"round": 1, "case": case, "step": step, "source": f"agent/{node(0)}"}
        incident = UNRIGHT if kind == "persistent" else fact_id()
        value = None if signal == "nan" else 9.5
        story.add(
            "numerics_suspected",
            ago,
            job,
            **of,
            signal=signal,
            value=value,
            low=2.1,
            high=2.7,
            moved_at=step - 2,
        )
        story.add("incident_opened", ago - 1, job, incident=incident, round=1, trigger="numerics", step=step, phase="step",
                  reason=reason, rank=11 if kind == "persistent" else None, node=node(1))  # fmt: skip
        story.add("numerics_judged", ago - 1, job, **of, incident=incident, signal=signal, kind=kind, reason=reason,
                  ranks=(11,), node=node(1), device="GPU-77aa", group="blocks.7.attn", first=value, again=(9.5, 9.5),
                  elsewhere=2.4, elsewhere_by=3, samples_from=step * 512, samples_to=(step + 1) * 512)  # fmt: skip
        for after, action in enumerate(acts):
            story.add("numerics_acted", ago - 2 - after, job, **of, incident=incident, action=action, outcome="done",
                      reason="the policy for such results", to_step=step - 40 if action in {"skip", "rollback"} else None,
                      samples_from=(step - 2) * 512 if action == "skip" else None,
                      samples_to=(step + 1) * 512 if action == "skip" else None)  # fmt: skip
        story.add("incident_closed", ago - 4, job, incident=incident, round=1, outcome="recovered", lost_steps=40,
                  reason=f"{reason}; rollback (done)", ledger=Ledger(other_s=3.0))  # fmt: skip
    results = tuple(
        ComparedResult(name=name, compared=120, different=different, largest=largest)
        for name, different, largest in (
            ("loss", 3, 2.4e-7),
            ("grad_norm", 5, 1.9e-6),
            ("blocks.7.attn", 5, None),
        )
    )
    story.add(
        "numerics_counted",
        120,
        job,
        round=1,
        steps=9000,
        again=120,
        results=results,
        source=f"agent/{node(0)}",
    )


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
              advice="inform",
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
              advice="restart_without", is_transient=True, analyzers=("stacks", "health"))  # fmt: skip
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
    if name == UNRIGHT_JOB:
        _numerics(story, name, began)
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
    if state == "stopped":
        story.add("operator_acted", ended - 3, name, round=1, by=user, action="stop_job", target="",
                  outcome="accepted", reason="wrong data set", origin="cli")  # fmt: skip
        story.add("round_ended", ended - 4, name, round=1, cause="operator", reason=reasons[state],
                  lasted_s=began - ended, last_step=last)  # fmt: skip
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
              source="attribution", advice="stop", evidence=(EvidenceItem(says="the exception is the same as before", analyzer="exits", weight=3.0),))  # fmt: skip
    story.add("incident_closed", ago - 4, job, round=1, incident=OPEN, outcome="failed", reason=reason, reports=1,
              ledger=Ledger(detect_s=0.1, evidence_s=0.9, decide_s=0.2, stop_s=2.0, rendezvous_s=0.0, start_s=0.0, first_step_s=0.0))  # fmt: skip
