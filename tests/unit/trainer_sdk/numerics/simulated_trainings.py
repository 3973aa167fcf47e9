"""Many small data-parallel trainings in one process: real gradients, and data of all sorts.

All jobs step together, as batched products of matrices. Each rank has data of its own, and a watch;
the gradients are averaged over the ranks of a job.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trainer_sdk.numerics.judgement import ROUNDING, RankResults, StepResult
from trainer_sdk.numerics.statistics import ResultWatch

RANKS, BATCH, WIDTH, HIDDEN = 8, 4, 8, 16
GROUPS = ("first", "second")


@dataclass(frozen=True, kw_only=True)
class Habit:
    """What a kind of training does that a watch might mistake for a fault."""

    label_noise: float = 0.3
    tail: float = 0.0
    """Degrees of freedom of the label noise; 0 for normal noise."""
    spikes: float = 0.0
    """How often a rank's batch is far larger than others are."""
    empty: float = 0.0
    """How often a rank's batch has no labels: its loss and gradients are 0."""
    shift_every: int = 0
    """Steps after which the data becomes other data."""
    offset: float = 0.0
    """Subtracted from each loss: that of some trainings is about 0."""
    is_bf16: bool = False
    is_exact: bool = False
    """Whether a step that runs again gives the same bits."""
    rounding: float = 0.0
    """How far a step that runs again may be off, relatively, in addition to the order of sums."""
    rate: Callable[[int], float] = lambda _step: 1e-2


def _jumps(step: int) -> float:
    return (1e-3, 1e-2, 5e-2, 1e-3)[step // 400 % 4]


def _warm_restarts(step: int) -> float:
    at = step % 1500
    return 2e-2 * min(1.0, (at + 1) / 200) * (1 + math.cos(math.pi * at / 1500)) / 2 + 1e-5


HABITS = {
    "plain": Habit(is_exact=True),
    "small and noisy": Habit(label_noise=5.0),
    "heavy tails": Habit(label_noise=1.0, tail=2.5, is_exact=True),
    "rate jumps": Habit(rate=_jumps, is_exact=True),
    "warm restarts": Habit(rate=_warm_restarts),
    "spiky data": Habit(spikes=1 / 300),
    "spiky and exact": Habit(spikes=1 / 1000, is_exact=True),
    "bf16": Habit(is_bf16=True, rounding=1e-4),
    "bf16 and rough": Habit(is_bf16=True, spikes=1 / 500, rounding=1e-3),
    "rough sums": Habit(rounding=2e-3, tail=3.0),
    "other data": Habit(shift_every=700, is_exact=True),
    "learned by heart": Habit(label_noise=0.0, is_exact=True),
    "empty batches": Habit(empty=1 / 200),
    "about zero": Habit(offset=0.1, rounding=1e-5),
    "about zero in bf16": Habit(offset=0.1, is_bf16=True, rounding=1e-3),
    "all at once": Habit(
        label_noise=1.0,
        tail=3.0,
        spikes=1 / 800,
        empty=1 / 800,
        shift_every=900,
        is_bf16=True,
        rounding=1e-3,
        rate=_jumps,
    ),
}


@dataclass(frozen=True, slots=True)
class Step:
    """What the ranks of all jobs computed: the first index is the job, the second the rank."""

    losses: Tensor
    first: Tensor
    second: Tensor
    outputs: Tensor
    """The norms of what the first layer hands on."""


class Trainings:
    """The jobs, each with a habit."""

    def __init__(self, habits: Sequence[Habit], seed: int) -> None:
        self.habits = habits
        self._random = torch.Generator().manual_seed(seed)
        self._dice = random.Random(seed)
        jobs = len(habits)
        self._weights = [self._normal(jobs, WIDTH, HIDDEN) / 3, self._normal(jobs, HIDDEN, 1) / 4]
        self._moments = [torch.zeros_like(weight) for weight in self._weights] * 2
        self._teacher = self._normal(jobs, WIDTH, 1)
        self._inputs = self._labels = self._weight = torch.empty(0)
        self.step = 0
        self.watches = [[ResultWatch() for _ in range(RANKS)] for _ in habits]

    def draw(self) -> None:
        """Draw the batches of the next step."""
        self.step += 1
        jobs = len(self.habits)
        self._inputs = self._normal(jobs, RANKS, BATCH, WIDTH)
        noise = self._normal(jobs, RANKS, BATCH, 1)
        weight = torch.ones(jobs, RANKS, 1, 1)
        for job, habit in enumerate(self.habits):
            if habit.tail:
                chi = torch.distributions.Chi2(habit.tail).sample((RANKS, BATCH, 1))
                noise[job] /= (chi / habit.tail).sqrt()
            noise[job] *= habit.label_noise
            if habit.shift_every and self.step % habit.shift_every == 0:
                self._teacher[job] += 2 * self._normal(WIDTH, 1)
            for rank in range(RANKS):
                if self._dice.random() < habit.spikes:
                    self._inputs[job, rank] *= self._dice.uniform(5, 40)
                if self._dice.random() < habit.empty:
                    weight[job, rank] = 0
        self._labels = self._inputs @ self._teacher[:, None] + noise
        self._weight = weight

    def compute(self) -> Step:
        """Return the losses and gradients of the batches; again, they are the same but for sums."""
        order = torch.randperm(BATCH, generator=self._random)
        exact = torch.tensor([habit.is_exact for habit in self.habits])[:, None, None, None]
        inputs = torch.where(exact, self._inputs, self._inputs[:, :, order])
        labels = torch.where(exact, self._labels, self._labels[:, :, order])
        first, second = (weight[:, None] for weight in self._weights)
        before = inputs @ first
        hidden = before.relu()
        error = (hidden @ second - labels) * self._weight
        losses = error.square().mean(dim=(2, 3))
        offsets = torch.tensor([habit.offset for habit in self.habits])[:, None]
        outer = 2 * error / BATCH
        inner = (outer @ second.mT) * (before > 0)
        step = Step(losses, inputs.mT @ inner, hidden.mT @ outer, hidden.norm(dim=(2, 3)))
        for values in (step.losses, step.first, step.second):
            self._round(values)
        step.losses.sub_(offsets)
        return step

    def _round(self, values: Tensor) -> None:
        for job, habit in enumerate(self.habits):
            if habit.rounding:
                values[job] *= 1 + habit.rounding * self._normal(*values[job].shape)
            if habit.is_bf16:
                values[job] = values[job].bfloat16().float()

    def learn(self, step: Step) -> None:
        """Let the optimizers step: Adam, after clipping the norm to 1."""
        norms = self.norms(step)
        gradients = [step.first.mean(1), step.second.mean(1)]
        rates = torch.tensor([habit.rate(self.step) for habit in self.habits])[:, None, None]
        for index, gradient in enumerate(gradients):
            clipped = gradient / norms.clamp(min=1)[:, None, None]
            mean, square = self._moments[index], self._moments[index + 2]
            mean = 0.9 * mean + 0.1 * clipped
            square = 0.99 * square + 0.01 * clipped.square()
            self._moments[index], self._moments[index + 2] = mean, square
            weight = self._weights[index] - rates * mean / (square.sqrt() + 1e-6)
            bf16 = torch.tensor([habit.is_bf16 for habit in self.habits])[:, None, None]
            self._weights[index] = torch.where(bf16, weight.bfloat16().float(), weight)

    @staticmethod
    def norms(step: Step) -> Tensor:
        """The norm of each job's averaged gradient."""
        return (
            step.first.mean(1).square().sum((1, 2)) + step.second.mean(1).square().sum((1, 2))
        ).sqrt()

    def results(
        self, job: int, runs: Sequence[Step], elsewhere: Step, world: int = RANKS
    ) -> list[RankResults]:
        """What the first ranks of a job computed, again and on the next rank."""
        return [
            RankResults(
                rank=rank,
                node=f"n{rank}",
                device="cpu",
                first=_result(runs[0], job, rank),
                again=tuple(_result(run, job, rank) for run in runs[1:]),
                elsewhere=_result(elsewhere, job, rank) if world > 1 else None,
                elsewhere_by=(rank + 1) % world if world > 1 else None,
            )
            for rank in range(world)
        ]

    def rounding(self, job: int) -> float:
        """What a job says about its algorithms."""
        return 0.0 if self.habits[job].is_exact else ROUNDING

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._random)


def _result(step: Step, job: int, rank: int) -> StepResult:
    gradients = (step.first[job, rank], step.second[job, rank])
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradients))
    hashes = tuple(hash(each.numpy().tobytes()) for each in gradients)
    return StepResult(float(step.losses[job, rank]), norm, hashes)
