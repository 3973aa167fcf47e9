"""Healthy trainings, whatever their steps are like: no rank of them is ever found to have stalled.

The real session writes real pages; the real watch judges them by the limits that health's real
rules learn from them. Only time is made up.
"""

import random
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.messages import LimitsDocument, NodeBeat
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.health.domain.limit_learner import LimitLearner
from everstep_services.health.settings import LimitSettings
from tests.unit.agent.stalls.monitored_ranks import WatchedNode
from tests.unit.agent.stalls.stalled_ranks import Clock, clock_of_pages

RANKS = 4
LESSON_EVERY_S = 10.0


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class Training:
    """Jitter, garbage collection, slow input, checkpoints, evaluation, and a restart at times."""

    def __init__(self, folder: Path, clock: Clock, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.clock = clock
        self.node = WatchedNode(folder, clock, LimitRules(), RANKS)
        self.steps = 0
        self.learned = 0
        self._step_s = self.rng.choice([0.05, 0.3, 2.0, 20.0])
        self._start_s = self.rng.uniform(1, 1500)
        self._learner = LimitLearner(LimitSettings())
        self._document: LimitsDocument | None = None
        self._taught_s = clock.now
        self._ordered_s = clock.now

    def train(self, rank_steps: int) -> None:
        """Until all ranks together have made this number of steps."""
        self._first_step()
        while self.steps * RANKS < rank_steps:
            chance = self.rng.random()
            if chance < 0.00002:
                self._restart()
            elif chance < 0.0003:
                self._together("checkpoint", self._step_s * self.rng.uniform(5, 60))
            elif chance < 0.0005:
                self._alone("evaluation", self._step_s * self.rng.uniform(10, 300))
            self._step()
            self._learn()
        assert not self.node.stalled, f"seed {self.seed}: {self.node.stalled[0]}"
        assert not self.node.said, f"seed {self.seed}: {self.node.said[0]}"

    def _first_step(self) -> None:
        self.node.wait(self._start_s * self.rng.uniform(0.5, 2))
        self._step()
        self._learner.started(self.node.round, self.clock.now - self._ordered_s, self.clock.now)

    def _restart(self) -> None:
        """Wherever its ranks are, sections open or not."""
        for rank in self.node.ranks:
            rank.run.begin("data")
        self.node.begin(self.node.round + 1)
        self._ordered_s = self.clock.now
        self._first_step()

    def _step(self) -> None:
        """One rank is the last in each section; the others wait for it outside or inside."""
        for name, share in (("data", 0.1), ("forward", 0.3), ("backward", 0.5), ("optimizer", 0.1)):
            self._together(name, self._took_s() * share)
        for rank in self.node.ranks:
            rank.run.step()
        self.steps += 1

    def _took_s(self) -> float:
        """Mostly a little more or less; rarely much more: a collection, slow storage."""
        took_s = self._step_s * self.rng.lognormvariate(0, 0.1)
        chance = self.rng.random()
        if chance < 0.0005:
            took_s += self.rng.uniform(1, 30)
        elif chance < 0.01:
            took_s += self.rng.uniform(0, 2)
        return took_s

    def _together(self, section: str, took_s: float) -> None:
        runs = [rank.run for rank in self.node.ranks]
        for run in runs:
            run.begin(section)
        self.node.wait(took_s)
        for run in runs:
            run.end(section)

    def _alone(self, section: str, took_s: float) -> None:
        """Rank 0 does it, and the others wait for it where they are."""
        first, *others = [rank.run for rank in self.node.ranks]
        for run in others:
            run.begin("backward")
        with first.section(section):
            self.node.wait(took_s)
        for run in others:
            run.end("backward")

    def _learn(self) -> None:
        now = self.clock.now
        if now - self._taught_s < LESSON_EVERY_S:
            return
        self._taught_s = now
        sections = self.node.watch.sections_seen()
        beat = NodeBeat(
            job="j",
            node="n",
            sequence=1,
            at=datetime(2026, 1, 1, tzinfo=UTC),
            state="running",
            round=self.node.round,
            slot=0,
            sections=sections,
            config_fingerprint="f",
        )
        self._learner.hear(beat, now)
        document = self._learner.proposed("j", self._document)
        if document is not None:
            self.learned += 1
            self._document = document
            self.node.watch.learned(document)


def test_twenty_thousand_rank_steps_without_a_finding(tmp_path: Path, clock: Clock) -> None:
    """Slow input, saves, evaluations and restarts, with limits that are learned (A3.1)."""
    for seed in range(4):
        training = Training(tmp_path, clock, seed)
        training.train(5000)
        assert training.learned, f"seed {seed}: nothing was learned"


def test_what_was_learned_finds_a_stall(tmp_path: Path, clock: Clock) -> None:
    """The rank and the section that stopped first are named (A3.2)."""
    training = Training(tmp_path, clock, 1)
    training.train(2000)
    training.node.ranks[0].run.begin("forward")
    for rank in training.node.ranks[1:]:
        rank.run.begin("backward")
    training.node.wait(1800)
    first = training.node.stalled[0]
    assert (first.place.rank, first.place.section) == (0, "forward")
    assert first.place.limit.source in {"learned", "floor"}


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(10))
def test_a_million_rank_steps_without_a_finding(tmp_path: Path, clock: Clock, chunk: int) -> None:
    """Forty more trainings of the same kind (A3.1)."""
    for seed in range(100 + chunk * 4, 100 + chunk * 4 + 4):
        Training(tmp_path, clock, seed).train(25_000)
