"""A simulated training that sends windows, with a known truth: who is slow, why, at what price."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from everstep.messages import (
    ClockOffset,
    CollectiveEntries,
    HostUse,
    NodeTimings,
    RankTiming,
    SectionTiming,
)
from tests.unit.messages.sketches import sketch_of

Array = npt.NDArray[np.float64]
Where = Literal["data", "forward", "backward", "host", "link", "ring", "sleep"]
SECTIONS = ("", "data", "forward", "backward", "optimizer")
SHARES = {"data": 0.1, "forward": 0.3, "backward": 0.5, "optimizer": 0.1}


@dataclass(frozen=True)
class Delay:
    """More time in each step, from one step on until another."""

    rank: int
    seconds: float
    where: Where = "data"
    first: int = 1
    last: int = 10**9


@dataclass(frozen=True)
class Training:
    """Data parallel, or tensor × data parallel, or a pipeline of data parallel stages."""

    seed: int = 0
    nodes: int = 2
    per_node: int = 4
    step_s: float = 0.1
    jitter: float = 0.02
    unequal: float = 0.003
    buckets: int = 1
    """More than one: DDP's. Ranks wait for the last one only."""
    tensor: int = 1
    layers: int = 2
    """All-reduces of the tensor group forward, and as many backward."""
    stages: int = 1
    stage_work: tuple[float, ...] = ()
    """How much each stage has to do, 1 for the step."""
    transfer_s: float = 0.001
    delays: tuple[Delay, ...] = ()
    offset_s: float = 0.0
    """Clocks of nodes are off by up to this."""
    drift: float = 0.0
    """And drift by up to this."""
    read_error_s: float = 0.0002
    are_clocks_read: bool = True
    has_sections: bool = True
    has_hosts: bool = True
    has_members: bool = True
    collected: float = 0.0
    """The chance of a garbage collection of half a step, each step and rank."""
    checkpoint_every: int = 0
    round: int = 1
    job: str = "job"
    roles: tuple[str, ...] = ()

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


@dataclass
class Simulation:
    """Runs window by window."""

    plan: Training
    random: np.random.Generator = field(init=False)
    now: Array = field(init=False)
    step: int = 0
    sequence: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        plan = self.plan
        self.random = np.random.default_rng(plan.seed)
        self.now = np.full(plan.world, 1_700_000_000.0)
        self.speed = 1 + self.random.normal(0, plan.unequal, plan.world)
        self.offsets = self.random.uniform(-1, 1, plan.nodes) * plan.offset_s
        self.drifts = self.random.uniform(-1, 1, plan.nodes) * plan.drift
        self.begun = self.now[0]
        self._forget()

    def _forget(self) -> None:
        world = self.plan.world
        self.entries: list[list[tuple[float, str, int, str, str]]] = [[] for _ in range(world)]
        self.walls: list[dict[str, list[float]]] = [
            {name: [] for name in SECTIONS} for _ in range(world)
        ]
        self.cpu = np.zeros(world)
        self.runnable = np.zeros(world)

    # ---- groups

    def groups(self, kind: str) -> list[list[int]]:
        plan = self.plan
        ranks = np.arange(plan.world)
        per_stage = plan.world // plan.stages
        if kind == "tp":
            return ranks.reshape(-1, plan.tensor).tolist()
        replicas = ranks.reshape(plan.stages, per_stage // plan.tensor, plan.tensor)
        return [list(one) for stage in replicas for one in stage.T.tolist()]

    def name(self, kind: str, number: int) -> str:
        return str({"tp": 1, "dp": 1000}[kind] + number)

    # ---- steps

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step += 1
            self._step()

    def _step(self) -> None:
        plan, begun = self.plan, self.now.copy()
        self._work("data")
        self._end("data", begun)
        at = self.now.copy()
        self._layers("forward")
        self._end("forward", at)
        at = self.now.copy()
        self._layers("backward")
        self._end("backward", at)
        at = self.now.copy()
        self._work("optimizer")
        self._end("optimizer", at)
        for rank in range(plan.world):
            self.walls[rank][""].append(float(self.now[rank] - begun[rank]))

    def _end(self, section: str, begun: Array) -> None:
        for rank in range(self.plan.world):
            self.walls[rank][section].append(float(self.now[rank] - begun[rank]))

    def _layers(self, section: str) -> None:
        plan = self.plan
        layers = plan.layers if plan.tensor > 1 else 0
        buckets = plan.buckets if section == "backward" else 0
        parts = max(layers, buckets, 1)
        pending: Array | None = None
        for part in range(parts):
            self._work(section, 1 / parts, delayed=part == parts - 1)
            if layers:
                self._together("tp", section, "all_reduce 4096", waits=True)
            if buckets and part >= parts - buckets:
                size = 1000 + part * 8
                ends = self._together("dp", section, f"all_reduce {size}", waits=False)
                pending = ends if pending is None else np.maximum(pending, ends)
        if pending is not None:
            self.now = np.maximum(self.now, pending)

    def _work(self, section: str, share: float = 1.0, *, delayed: bool = True) -> None:
        plan = self.plan
        base = plan.step_s * SHARES[section] * share * self.speed
        if plan.stage_work and section in ("forward", "backward"):
            per_stage = plan.world // plan.stages
            base = base * np.repeat(plan.stage_work, per_stage)
        took = base * (1 + plan.jitter * self.random.normal(0, 1, plan.world)).clip(0.2)
        if section == "forward":
            hit = self.random.random(plan.world) < plan.collected * share
            took = took + hit * plan.step_s * 0.5
        if plan.checkpoint_every and section == "optimizer":
            is_due = self.step % plan.checkpoint_every == 0
            took = took + is_due * plan.step_s * self.random.normal(1, 0.1, plan.world).clip(0)
        self.cpu += took
        for one in plan.delays:
            place = {"host": "forward", "sleep": "forward", "link": "", "ring": ""}.get(
                one.where, one.where
            )
            if place == section and one.first <= self.step <= one.last and delayed:
                took[one.rank] += one.seconds
                self.cpu[one.rank] += one.seconds * (one.where in ("forward", "backward"))
                self.runnable[one.rank] += one.seconds * (one.where == "host")
        self.now = self.now + took

    def _together(self, kind: str, section: str, op: str, *, waits: bool) -> Array:
        ends = np.empty(self.plan.world)
        for number, members in enumerate(self.groups(kind)):
            name = self.name(kind, number)
            sequence = self.sequence.get(name, 0)
            self.sequence[name] = sequence + 1
            for rank in members:
                self.entries[rank].append((float(self.now[rank]), name, sequence, op, section))
            over = self.now[members].max() + self.plan.transfer_s
            ends[members] = over
            for one in self.plan.delays:
                if one.where in ("link", "ring") and one.rank in members:
                    is_on = one.first <= self.step <= one.last
                    late = one.rank if one.where == "link" else members[members.index(one.rank) - 1]
                    ends[late] += one.seconds * is_on
        if waits:
            self.now = np.maximum(self.now, ends)
        return ends

    # ---- messages

    def window(self, steps: int = 16) -> list[NodeTimings]:
        first, begun = self.step + 1, self.now.copy()
        self._forget()
        self.run(steps)
        return [self._node(node, first, begun) for node in range(self.plan.nodes)]

    def _node(self, node: int, first: int, begun: Array) -> NodeTimings:
        plan = self.plan
        ranks = range(node * plan.per_node, (node + 1) * plan.per_node)
        last = float(self.now[list(ranks)].max())
        return NodeTimings(
            job=plan.job, node=f"node-{node}", round=plan.round, slot=node, slots=plan.nodes,
            world=plan.world, first_step=first, last_step=self.step,
            window_s=last - float(begun[ranks[0]]), clocks=self._clocks(node, last),
            ranks=tuple(self._rank(node, rank, first, begun) for rank in ranks),
        )  # fmt: skip

    def _ahead(self, node: int, at: float) -> float:
        return float(self.offsets[node] + self.drifts[node] * (at - self.begun))

    def _clocks(self, node: int, at: float) -> tuple[ClockOffset, ...]:
        if not self.plan.are_clocks_read:
            return ()
        error = self.plan.read_error_s
        off = self._ahead(node, at) + float(self.random.uniform(-1, 1)) * error
        return (ClockOffset(clock="straggler-0", offset_s=off, error_s=error),)

    def _rank(self, node: int, rank: int, first: int, begun: Array) -> RankTiming:
        plan, steps = self.plan, self.step - first + 1
        kept = self.entries[rank][-64:]
        from_s = kept[0][0] + self._ahead(node, kept[0][0]) if kept else 0.0
        is_slow_link = any(
            one.rank == rank
            and one.where in ("link", "ring")
            and one.first <= self.step <= one.last
            for one in plan.delays
        )
        return RankTiming(
            rank=rank, steps=steps, window_s=float(self.now[rank] - begun[rank]),
            role=plan.roles[rank] if plan.roles else "",
            sections=self._sections(rank),
            entries_from_s=from_s, collectives=tuple(self._runs(node, rank, kept, from_s)),
            host=HostUse(
                cpu_s=float(self.cpu[rank]) * 1.05, main_cpu_s=float(self.cpu[rank]),
                runnable_s=float(self.runnable[rank]) + 0.001 * steps,
                involuntary_switches=int(self.runnable[rank] / 0.003) + 3,
                round_trip_s=(20 if is_slow_link else 0.1) * self.random.uniform(8e-4, 1.2e-3),
                retransmits=0,
            ) if plan.has_hosts else None,
        )  # fmt: skip

    def _sections(self, rank: int) -> tuple[SectionTiming, ...]:
        if not self.plan.has_sections:
            return ()
        return tuple(
            SectionTiming(section=name, wall=sketch_of(self.walls[rank][name])) for name in SECTIONS
        )

    def _runs(
        self, node: int, rank: int, kept: Sequence[tuple[float, str, int, str, str]], from_s: float
    ) -> Iterator[CollectiveEntries]:
        members = {
            self.name(kind, number): tuple(one)
            for kind in ("tp", "dp")
            for number, one in enumerate(self.groups(kind))
            if rank in one
        }
        for name in dict.fromkeys(one[1] for one in kept):
            mine = [one for one in kept if one[1] == name]
            ops = list(dict.fromkeys(one[3] for one in mine))
            yield CollectiveEntries(
                group=name, first_sequence=mine[0][2],
                entered_us=tuple(
                    round((one[0] + self._ahead(node, one[0]) - from_s) * 1e6) for one in mine
                ),
                ops=tuple(ops), op=tuple(ops.index(one[3]) for one in mine),
                section=tuple(SECTIONS.index(one[4]) for one in mine)
                if self.plan.has_sections else (),
                members=members[name] if self.plan.has_members else (),
            )  # fmt: skip


def healthy(plan: Training) -> Training:
    """The same training without its delays, with the same draws."""
    return replace(plan, delays=())
