"""A day of a healthy training, and all in it that only looks like a stall: nobody is found.

Real sessions write real pages, the real judge looks at them whenever it wants to, by the limits
that health's real rules learn meanwhile. Made up are time, and what the kernel and the flight
recorder say of ranks whose pages are silent.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from everstep.messages import LimitsDocument, NodeBeat, SectionSeen
from everstep_services.agent.stalls.judge import Excused, Moving, Stalled, StallJudge
from everstep_services.agent.stalls.limits import LimitRules, StallLimits
from everstep_services.agent.stalls.rank_view import ActivitySigns
from everstep_services.health.domain.limit_learner import LimitLearner
from everstep_services.health.settings import LimitSettings
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages
from trainer_sdk import layout
from trainer_sdk.page_content import CountedBy
from trainer_sdk.rank_session import Session

RANKS = 3
MINUTE_S, HOUR_S = 60.0, 3600.0
LOOK_CLOSER_EVERY_S, SILENT_S, BEAT_EVERY_S = 5.0, 30.0, 30.0
STEP_S = 120.0


@dataclass
class Wait:
    """What a rank does that waits in a collective for the others."""

    since_s: float


class Node:
    """Three ranks, their judge, and the health service that learns from them."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.clock = clock
        self.began_s = clock.now
        self.limits = StallLimits(LimitRules())
        self.ranks = [StallRank(folder, rank, clock) for rank in range(RANKS)]
        self.waits: dict[int, Wait] = {}
        self.judge = StallJudge(self.limits, clock.now)
        self.found: list[Stalled] = []
        self.excused = 0
        self.learned = 0
        self._learner = LimitLearner(LimitSettings())
        self._document: LimitsDocument | None = None
        self._closer_at = self._beat_at = clock.now

    @property
    def hours(self) -> float:
        return (self.clock.now - self.began_s) / HOUR_S

    def look(self) -> None:
        news = self.judge.look([rank.view() for rank in self.ranks], self.clock.now)
        self.found += [one for one in news if isinstance(one, Stalled)]
        self.excused += sum(isinstance(one, Excused) for one in news)
        assert not any(isinstance(one, Moving) for one in news), news

    def wait(self, seconds: float) -> None:
        """Let time pass, with looks and beats when an agent has them."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            due = min(self.judge.wake_at, self._closer_at, self._beat_at, end)
            self.clock.now = max(self.clock.now, due)
            if self.clock.now >= self._closer_at:
                self._look_closer()
                self._closer_at = self.clock.now + LOOK_CLOSER_EVERY_S
            if self.clock.now >= self._beat_at:
                self._beat()
                self._beat_at = self.clock.now + BEAT_EVERY_S
            if self.clock.now >= self.judge.wake_at or self.clock.now >= end:
                self.look()

    def absent(self, seconds: float) -> None:
        """The agent does not run either."""
        self.clock.now += seconds
        self.look()

    @contextmanager
    def waiting(self, *ranks: int) -> Iterator[None]:
        """These have entered a collective, and wait there for the others."""
        for rank in ranks:
            self.waits[rank] = Wait(self.clock.now)
        try:
            yield
        finally:
            for rank in ranks:
                del self.waits[rank]

    def _look_closer(self) -> None:
        """As the agent does at ranks whose pages say nothing."""
        now = self.clock.now
        for rank in self.ranks:
            page = rank.view_of_page.read()
            moved_s = self.began_s if page is None else page.progress_s
            if page is not None and page.steps and page.counted_by is CountedBy.SDK:
                continue
            if now - moved_s < SILENT_S:
                continue
            wait = self.waits.get(rank.rank)
            rank.signs = (
                ActivitySigns(idle_s=0.0, collective_s=rank.signs.collective_s)
                if wait is None
                else ActivitySigns(now - wait.since_s, wait.since_s, "ALLREDUCE")
            )

    def _beat(self) -> None:
        beat = NodeBeat(
            job="j", node="n", sequence=1, at=datetime(2026, 1, 1, tzinfo=UTC), state="running",
            round=1, slot=0, sections=tuple(self._sections()), config_fingerprint="f",
        )  # fmt: skip
        self._learner.hear(beat, self.clock.now)
        document = self._learner.proposed("j", self._document)
        if document is not None:
            self.learned += 1
            self._document = document
            self.limits.learn(document)

    def _sections(self) -> Iterator[SectionSeen]:
        """What the pages say, each section once for the node."""
        longest: dict[str, SectionSeen] = {}
        for rank in self.ranks:
            page = rank.view_of_page.read()
            if page is None or not page.steps:
                continue
            if page.counted_by is not CountedBy.SDK:
                seen = [("", "plain", page.longest_step_s, page.steps - 1)]
            else:
                seen = [
                    (one.name, one.kind.value, one.longest_s, one.observed)
                    for one in rank.view_of_page.sections()
                    if one.observed or not one.name
                ]
            for name, kind, longest_s, times in seen:
                known = longest.get(name)
                if known is None or known.longest_s < longest_s:
                    longest[name] = SectionSeen(
                        section=name, kind=kind, longest_s=longest_s, observations=times
                    )
        yield from longest.values()


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock_of_pages(clock):
        yield clock


class Training:
    """With the SDK: sections, steps, a pause for a debugger."""

    sections = ("data", "forward", "backward", "optimizer")

    def __init__(self, node: Node) -> None:
        self.node = node
        self.runs = [rank.run for rank in node.ranks]

    def starts(self) -> None:
        node = self.node
        with self.runs[0].section("dataset"):
            node.wait(1)
            with node.waiting(1, 2):
                node.wait(2 * HOUR_S - 1)
        node.wait(20 * MINUTE_S)  # the first step: all compile,
        with node.waiting(0, 1):
            node.wait(10 * MINUTE_S)  # and one takes longer
        self.steps_end()

    def step(self, slow_s: float = 0.0) -> None:
        """All in step; one rank is late in the forward pass, as when it collects its garbage."""
        for name in self.sections:
            for run in self.runs:
                run.begin(name)
            self.node.wait(STEP_S / len(self.sections))
            for run in self.runs[1:]:
                run.end(name)
            if name == "forward" and slow_s:
                with self.others_in("backward", self.runs[1:]):
                    self.node.wait(slow_s)
            self.runs[0].end(name)
        self.steps_end()

    def steps_end(self) -> None:
        for run in self.runs:
            run.step()

    @contextmanager
    def others_in(self, section: str, others: Sequence[Session]) -> Iterator[None]:
        for run in others:
            run.begin(section)
        yield
        for run in others:
            run.end(section)

    def evaluates(self) -> None:
        with self.others_in("backward", self.runs[1:]), self.runs[0].section("evaluation"):
            self.node.wait(40 * MINUTE_S)

    def saves(self) -> None:
        with self.others_in("checkpoint", self.runs):
            self.node.wait(30 * MINUTE_S)

    def is_debugged(self) -> None:
        others = [run for run in self.runs if run is not self.runs[2]]
        with self.others_in("backward", others), self.runs[2].pause(reason="debugger"):
            self.node.wait(3 * HOUR_S)

    def is_stopped(self) -> None:
        """SIGSTOP and SIGCONT of one rank, in its forward pass."""
        self.runs[1].begin("forward")
        others = [run for run in self.runs if run is not self.runs[1]]
        with self.others_in("backward", others):
            self.node.wait(MINUTE_S)
        self.runs[1].end("forward")


class Unmodified(Training):
    """A script that knows nothing of us: steps of its optimizer, and what others see of it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        for rank in node.ranks:
            rank.link.words[layout.PHASE] = layout.PHASE_SCRIPT

    def starts(self) -> None:
        node = self.node
        node.wait(1)
        with node.waiting(1, 2):
            node.wait(2 * HOUR_S - 1)
        node.wait(20 * MINUTE_S)
        with node.waiting(0, 1):
            node.wait(10 * MINUTE_S)
        self.steps_end()

    def step(self, slow_s: float = 0.0) -> None:
        self.node.wait(STEP_S)
        if slow_s:
            with self.node.waiting(1, 2):
                self.node.wait(slow_s)
        self.steps_end()

    def steps_end(self) -> None:
        now_ns = self.node.clock.ns()
        for rank in self.node.ranks:
            words = rank.link.words
            words[layout.COUNTED_BY] = layout.BY_OPTIMIZER
            words[layout.STEPS] = words[layout.STEP] = words[layout.STEP] + 1
            if words[layout.STEP] > 1:
                took_ns = now_ns - words[layout.PROGRESS_NS]
                words[layout.LONGEST_STEP_NS] = max(words[layout.LONGEST_STEP_NS], took_ns)
            words[layout.PROGRESS_NS] = now_ns

    def evaluates(self) -> None:
        with self.node.waiting(1, 2):
            self.node.wait(40 * MINUTE_S)

    def saves(self) -> None:
        self.node.wait(30 * MINUTE_S)

    def is_debugged(self) -> None:
        """It cannot ask for a pause."""

    def is_stopped(self) -> None:
        with self.node.waiting(0, 2):
            self.node.wait(MINUTE_S)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("kind", [Training, Unmodified])
def test_a_day_without_a_false_finding(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, kind: type[Training]
) -> None:
    """Slow first steps, evaluation, saves, pauses, SIGSTOP and clock jumps of an hour (A3.1)."""
    node = Node(tmp_path, clock)
    wall = {"ahead_s": 0.0}
    monkeypatch.setattr(time, "time", lambda: clock.now + wall["ahead_s"])
    training = kind(node)
    training.starts()
    events: list[tuple[float, Callable[[], object]]] = [
        (3.0, training.evaluates),
        (4.5, training.saves),
        (6.0, training.is_stopped),
        (7.0, training.is_debugged),
        (11.0, lambda: node.absent(MINUTE_S)),  # SIGSTOP and SIGCONT of agent and ranks
        (11.5, lambda: node.absent(HOUR_S)),  # their whole machine was suspended
        (13.0, lambda: wall.update(ahead_s=HOUR_S)),
        (13.5, lambda: wall.update(ahead_s=-HOUR_S)),
        (14.0, training.evaluates),
        (16.0, training.saves),
        (20.0, training.evaluates),
    ]
    steps = 0
    while node.hours < 24:
        if events and node.hours >= events[0][0]:
            events.pop(0)[1]()
        steps += 1
        training.step(slow_s=30 if steps % 20 == 0 else 0)
        assert not node.found, (node.hours, node.found[0])
    assert not events
    assert node.excused
    assert node.learned


def test_the_same_day_finds_a_rank_that_has_stalled(tmp_path: Path, clock: Clock) -> None:
    """The same judge names the rank and the section of a real hang (A3.2)."""
    node = Node(tmp_path, clock)
    training = Training(node)
    training.starts()
    for _ in range(20):
        training.step()
    training.runs[2].begin("forward")
    node.wait(1)
    with training.others_in("backward", training.runs[:2]):
        node.wait(HOUR_S / 2)
    first = node.found[0]
    assert (first.place.rank, first.place.section) == (2, "forward")
    assert first.place.limit.source in {"learned", "floor"}
