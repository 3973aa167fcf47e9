"""A training with data and pipeline parallelism, simulated step by step into a table of operations.

It shares nothing with the replay that is scored on it: times are followed forwards, microbatch by
microbatch, as a schedule orders them. The same seed without the slow rank is the truth of a price.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.straggler_traces.distributions import (
    DAY_S,
    PLAIN,
    Array,
    Noise,
    Slow,
    drifts,
    lognormal,
)

Task = tuple[str, int, int]
"""`forward` or `backward`, the microbatch, the chunk."""


@dataclass(frozen=True)
class Plan:
    seed: int
    data: int = 8
    pipeline: int = 1
    microbatches: int = 8
    steps: int = 60
    schedule: str = "1f1b"
    """`gpipe`, `1f1b` or `interleaved` (two chunks a stage)."""
    noise: Noise = PLAIN
    slow: tuple[Slow, ...] = ()
    last_stage: float = 0.0
    """How much more work the last stage has."""
    forward_s: float = 0.05
    transfer_s: float = 0.02
    """Of the gradients."""
    link_s: float = 0.001
    lengths_shown: bool = False
    transfers_shown: bool = True
    """Whether sends and receives are in the table."""
    clocks_s: float = 0.0
    """Deviation of the ranks' clocks."""

    @property
    def ranks(self) -> int:
        return self.data * self.pipeline

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1


def orders(plan: Plan) -> list[list[Task]]:
    """What each stage does, in order."""
    return [_order(plan, stage) for stage in range(plan.pipeline)]


def _order(plan: Plan, stage: int) -> list[Task]:
    forwards = [("forward", m, c) for m, c in _sequence(plan)]
    backwards = [("backward", m, plan.chunks - 1 - c) for m, c in _sequence(plan)]
    if plan.schedule == "gpipe":
        return [*forwards, *backwards]
    warm = plan.pipeline - stage - 1
    if plan.chunks > 1:
        warm = 2 * warm + (plan.chunks - 1) * plan.pipeline
    warm = min(warm, len(forwards))
    order = forwards[:warm]
    for ahead, back in zip(forwards[warm:], backwards, strict=False):
        order += [ahead, back]
    return [*order, *backwards[len(forwards) - warm :]]


def _sequence(plan: Plan) -> Iterator[tuple[int, int]]:
    """Microbatches in groups of as many as there are stages, chunk after chunk."""
    width = plan.pipeline if plan.chunks > 1 else plan.microbatches
    for first in range(0, plan.microbatches, width):
        for chunk in range(plan.chunks):
            for microbatch in range(first, min(first + width, plan.microbatches)):
                yield microbatch, chunk


@dataclass
class Draws:
    """All that is random, drawn before anything is slow: the same with and without."""

    unequal: Array
    drift: Array
    lengths: Array
    jitter: Array
    collected: Array
    links: Array
    transfers: Array
    checkpoints: Array
    data: Array
    gaps: Array


def draw(plan: Plan) -> Draws:
    random = np.random.default_rng(plan.seed)
    noise, steps, ranks = plan.noise, plan.steps, plan.ranks
    tasks = 2 * plan.microbatches * plan.chunks
    return Draws(
        unequal=1 + random.normal(0, noise.unequal, ranks),
        drift=1 + drifts(random, noise.drift, steps, ranks),
        lengths=lognormal(random, noise.lengths, (steps, plan.data, plan.microbatches)),
        jitter=lognormal(random, noise.jitter, (steps, tasks + 1, ranks)),
        collected=np.where(
            random.random((steps, ranks)) < noise.collected,
            random.uniform(0.05, 0.2, (steps, ranks)),
            0.0,
        ),
        links=lognormal(random, noise.transfers, (steps, tasks, ranks)),
        transfers=lognormal(random, noise.transfers, (steps, plan.pipeline + 1)),
        checkpoints=lognormal(random, 0.1, (steps, ranks)),
        data=lognormal(random, 0.1, (steps, ranks)),
        gaps=random.exponential(0.0001, (steps, tasks + 4, ranks)),
    )


@dataclass
class Simulated:
    columns: dict[str, list[Any]]
    total_s: float
    """From the beginning of the first step to the end of the last."""


def simulate(plan: Plan) -> Simulated:
    run = _Run(plan, draw(plan))
    for step in range(plan.steps):
        run.step(step)
    return Simulated(run.columns(), float(run.free.max()))


def truth(plan: Plan) -> float:
    """How much faster the job is without its slow ranks: the same draws, nobody slow."""
    return simulate(plan).total_s / simulate(replace(plan, slow=())).total_s - 1


class _Run:
    def __init__(self, plan: Plan, draws: Draws) -> None:
        self.plan, self.draws = plan, draws
        self.free = np.zeros(plan.ranks)
        self.rows: list[tuple[Array, int, str, Array, Array, str, int, Array]] = []
        self.orders = orders(plan)
        shifts = np.random.default_rng(plan.seed + 1).normal(0, plan.clocks_s, plan.ranks)
        self.clocks = shifts if plan.clocks_s else np.zeros(plan.ranks)

    def stage(self, stage: int) -> Array:
        return np.arange(self.plan.data) + stage * self.plan.data

    def factor(self, step: int, what: str) -> Array:
        found = np.ones(self.plan.ranks)
        for one in self.plan.slow:
            if one.what == what and one.first <= step < one.last:
                found[one.rank] += one.ratio
        return found

    def put(
        self, at: Array, step: int, op: str, start: Array, end: Array, group: str = "",
        microbatch: int = -1, tokens: Array | None = None,
    ) -> None:  # fmt: skip
        amount = np.full(len(at), np.nan) if tokens is None else tokens
        self.rows.append((at, step, op, start, end - start, group, microbatch, amount))

    def step(self, step: int) -> None:
        plan, draws = self.plan, self.draws
        every = np.arange(plan.ranks)
        self.gap = iter(draws.gaps[step])
        begun = self.free + next(self.gap)
        whole_s = plan.forward_s * 3 * plan.microbatches
        waits = 0.01 * whole_s * draws.data[step] + (self.factor(step, "input") - 1) * whole_s
        self.put(every, step, "data", begun, begun + waits)
        self.free = begun + waits
        self.microbatches(step)
        for stage in range(plan.pipeline):
            at = self.stage(stage)
            took = plan.transfer_s * draws.transfers[step, stage] * self.network(step, at)
            self.together(at, step, "all_reduce", f"dp{stage}", took)
        took = plan.transfer_s * 0.05 * draws.transfers[step, -1] * self.network(step, every)
        self.together(every, step, "all_reduce_norm", "world", took)
        begun = self.free + next(self.gap)
        work = 0.03 * whole_s * self.own(step, -1) + draws.collected[step] * whole_s
        self.put(every, step, "optimizer", begun, begun + work)
        self.free = begun + work
        if plan.noise.checkpoint_every and (step + 1) % plan.noise.checkpoint_every == 0:
            end = self.free + 0.3 * whole_s * draws.checkpoints[step]
            self.put(every, step, "checkpoint", self.free, end)
            self.free = end

    def network(self, step: int, at: Array) -> float:
        day = 1 + self.plan.noise.day * np.sin(2 * np.pi * float(self.free.max()) / DAY_S)
        return float(day * self.factor(step, "network")[at].max())

    def own(self, step: int, task: int) -> Array:
        draws = self.draws
        own: Array = draws.unequal * draws.drift[step] * draws.jitter[step, task]
        return own * self.factor(step, "compute")

    def together(self, at: Array, step: int, op: str, group: str, took: float) -> None:
        end = np.full(len(at), self.free[at].max() + took)
        self.put(at, step, op, self.free[at], end, group)
        self.free[at] = end

    def microbatches(self, step: int) -> None:
        plan = self.plan
        done: dict[tuple[int, Task], Array] = {}
        place = [0] * plan.pipeline
        gaps = self.draws.gaps[step]
        while any(at < len(order) for at, order in zip(place, self.orders, strict=True)):
            for stage, order in enumerate(self.orders):
                while place[stage] < len(order):
                    task = order[place[stage]]
                    before = self.before(stage, task)
                    if before is not None and before not in done:
                        break
                    number = place[stage]
                    self.task(step, stage, task, number, None if before is None else done[before],
                              gaps[number + 1])  # fmt: skip
                    done[stage, task] = self.free[self.stage(stage)].copy()
                    place[stage] += 1

    def before(self, stage: int, task: Task) -> tuple[int, Task] | None:
        """The task on another stage whose result this one needs."""
        way, microbatch, chunk = task
        last = self.plan.pipeline - 1
        if way == "forward":
            if stage > 0:
                return stage - 1, task
            return None if chunk == 0 else (last, (way, microbatch, chunk - 1))
        if stage < last:
            return stage + 1, task
        return None if chunk == self.plan.chunks - 1 else (0, (way, microbatch, chunk + 1))

    def task(
        self, step: int, stage: int, task: Task, number: int, sent: Array | None, gaps: Array
    ) -> None:
        plan, at = self.plan, self.stage(stage)
        way, microbatch, _ = task
        free = self.free[at] + gaps[at]
        if sent is not None:
            took = plan.link_s * self.draws.links[step, number, at]
            took = took * self.factor(step, "network")[at]
            arrived = np.maximum(free, sent) + took
            if plan.transfers_shown:
                self.put(at, step, f"recv_{way}", free, arrived, microbatch=microbatch)
            free = arrived
        lengths = self.draws.lengths[step, :, microbatch]
        base = plan.forward_s / plan.chunks * (1 if way == "forward" else 2)
        if stage == plan.pipeline - 1:
            base *= 1 + plan.last_stage
        work = base * lengths * self.own(step, number)[at]
        tokens = lengths * 4096 if plan.lengths_shown else None
        self.put(at, step, way, free, free + work, microbatch=microbatch, tokens=tokens)
        self.free[at] = free + work
        if plan.transfers_shown and self.sends(stage, task):
            end = self.free[at] + 1e-5
            self.put(at, step, f"send_{way}", self.free[at].copy(), end, microbatch=microbatch)

    def sends(self, stage: int, task: Task) -> bool:
        way, _, chunk = task
        last = self.plan.pipeline - 1
        if way == "forward":
            return stage < last or chunk < self.plan.chunks - 1
        return stage > 0 or chunk > 0

    def columns(self) -> dict[str, list[Any]]:
        """As a file has them; ranks of a stage follow one another."""
        ranks = np.concatenate([row[0] for row in self.rows])
        counts = [len(row[0]) for row in self.rows]

        def repeated(place: int) -> list[Any]:
            return [value for row, count in zip(self.rows, counts, strict=True)
                    for value in [row[place]] * count]  # fmt: skip

        found = {
            "rank": ranks.tolist(),
            "step": repeated(1),
            "op": repeated(2),
            "start": (np.concatenate([row[3] for row in self.rows]) + self.clocks[ranks]).tolist(),
            "duration": np.concatenate([row[4] for row in self.rows]).tolist(),
            "group": repeated(5),
            "data_rank": (ranks % self.plan.data).tolist(),
            "pipeline_rank": (ranks // self.plan.data).tolist(),
            "microbatch": [None if one < 0 else one for one in repeated(6)],
        }
        if self.plan.lengths_shown:
            tokens = np.concatenate([row[7] for row in self.rows]).tolist()
            found["tokens"] = [None if one != one else one for one in tokens]
        return found
