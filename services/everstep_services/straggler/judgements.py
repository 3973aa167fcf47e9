"""The pure work on jobs, off the event loop: each judgement in a thread, a few jobs at a time.

A window of 100 000 ranks takes seconds. Meanwhile other jobs are judged, questions are answered and
documents written: none of them may touch the judge, which belongs to the holder of the job's lock.
"""

import asyncio
import math
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from everstep.bus.input_failures import InputFailures
from everstep.clock import Clock
from everstep.messages import (
    HeatMapPart,
    KnownStraggler,
    NodeTimings,
    RankScoreTable,
    ShowHeatMap,
    ShowTimings,
    TimingTable,
)
from everstep_services.straggler.domain.changes import Change, SlowRankFound
from everstep_services.straggler.domain.rules import LiveRules

_JOBS_AT_ONCE = 4
"""Of a process with one interpreter lock: more would only wait for each other."""
_WINDOWS_AT_ONCE = 512
"""Messages, some 0.2 s. A question about the job waits at most for these."""
_LOOKS_FOR_OVERDUE = 5
"""The number of looks during the time that windows wait for nodes."""
_RANKS_WATCHED = 1000
T = TypeVar("T")


class Judge(Protocol):
    """Judges the windows of one job: `domain.job.JobJudge`."""

    rules: LiveRules
    refused: Counter[str]

    @property
    def round(self) -> int | None: ...
    def hear(self, timings: NodeTimings, now: float) -> None: ...
    def close_due(self, now: float) -> list[Change]: ...
    def end(self, reason: str) -> Sequence[Change]: ...
    def adopt(self, stragglers: Iterable[KnownStraggler]) -> None: ...
    def window_steps(self, window_s: float) -> int | None: ...
    def scores(self, most: int, role: str) -> RankScoreTable: ...
    def timings(self, question: ShowTimings) -> TimingTable: ...
    def heat_map_part(self, question: ShowHeatMap, most_ranks: int) -> HeatMapPart: ...
    def summary(self) -> Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class JudgeSnapshot:
    """What a judge knew after its last judgement. Any thread may read it: it never changes."""

    round: int | None = None
    window_steps: int | None = None
    window: int = 0
    slower_ratios: Mapping[int, float] = field(default_factory=dict)
    """Of the slowest ranks, where one was found to be slow."""
    summary: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JudgementOutcome:
    """The result of a judgement."""

    changes: Sequence[Change]
    snapshot: JudgeSnapshot
    adopted: Sequence[KnownStraggler]
    refused: Counter[str]
    failures: Sequence[Exception]
    """Of messages that the judge could not take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobJudgement:
    """The work for a judge, in this order: hear, adopt, judge; or end."""

    judge: Judge
    before: JudgeSnapshot = JudgeSnapshot()
    heard: Sequence[tuple[NodeTimings, float]] = ()
    """Windows, with the time when each came."""
    stragglers: Collection[KnownStraggler] = ()
    """Findings that other replicas have made."""
    window_s: float = 0.0
    is_watched: bool = False
    """Policy looks at how slow ranks are."""
    ending: str = ""
    """Why the judge must end; empty while it goes on."""

    def run(self, now: float) -> JudgementOutcome:
        """Judge. For one judge, only one thread at a time may."""
        judge, refused = self.judge, Counter(self.judge.refused)
        failures = [failure for heard in self.heard if (failure := self._hear(*heard))]
        adopted = [straggler for straggler in self.stragglers if straggler.round == judge.round]
        if adopted:
            judge.adopt(adopted)
        changes = judge.end(self.ending) if self.ending else judge.close_due(now)
        snapshot = JudgeSnapshot() if self.ending else self._snapshot(changes)
        return JudgementOutcome(
            changes, snapshot, adopted, Counter(judge.refused) - refused, failures
        )

    def _hear(self, timings: NodeTimings, at: float) -> Exception | None:
        try:
            self.judge.hear(timings, at)
        except Exception as error:  # noqa: BLE001  the other messages are as good as before
            return error
        return None

    def _snapshot(self, changes: Sequence[Change]) -> JudgeSnapshot:
        judge, before = self.judge, self.before
        summary = dict(judge.summary())
        is_watched = self.is_watched or any(
            isinstance(change, SlowRankFound) and not change.is_design for change in changes
        )
        if not changes and summary == before.summary and is_watched <= bool(before.slower_ratios):
            table = None  # no window was closed: tables of many ranks take their time
        else:
            table = judge.scores(_RANKS_WATCHED if is_watched else 1, "")
        ratios = {rank.rank: rank.slower_ratio or 0.0 for rank in table.ranks} if table else {}
        return JudgeSnapshot(
            round=judge.round,
            window_steps=judge.window_steps(self.window_s),
            window=table.window if table else before.window,
            slower_ratios=(ratios if is_watched else {}) if table else before.slower_ratios,
            summary=summary,
        )


class JobWork:
    """The waiting work of one job, and its judge."""

    def __init__(self, judge: Judge, most_waiting: int) -> None:
        self.judge = judge
        """Only the holder of the lock may touch it, except for its rules."""
        self.past: Judge | None = None
        """The judge before, which knows the last windows until this one has its own."""
        self.lock = asyncio.Lock()
        self.is_running = False
        self.snapshot = JudgeSnapshot()
        """What the judge knew after its last judgement."""
        self.has_news = False
        """Windows were judged since the policy last looked."""
        self._most_waiting = most_waiting
        self._waiting: deque[tuple[NodeTimings, float]] = deque()
        """Windows that the judge has not heard yet, and when each came."""
        self._retired: deque[tuple[Judge, str]] = deque()
        """Judges that must end, with the reason: another judge has taken their place."""
        self._heard_at = self._judged_at = -math.inf

    @property
    def is_busy(self) -> bool:
        """Something must still be judged."""
        return self.is_running or bool(self._waiting or self._retired)

    @property
    def newest_round(self) -> int | None:
        """The newest round with data."""
        rounds = None if self.snapshot.round is None else [self.snapshot.round]
        return max(
            [*(rounds or []), *(timings.round for timings, _ in self._waiting)], default=None
        )

    def put(self, timings: NodeTimings, now: float) -> bool:
        """Add a window. Returns False if the oldest one was dropped for it."""
        self._heard_at = now
        has_room = len(self._waiting) < self._most_waiting
        if not has_room:
            self._waiting.popleft()
        self._waiting.append((timings, now))
        return has_room

    def forget(self, objection: Callable[[NodeTimings], str]) -> Counter[str]:
        """Drop waiting windows that have an objection; return their number by reason."""
        judged = [(waiting, objection(waiting[0])) for waiting in self._waiting]
        self._waiting = deque(waiting for waiting, why in judged if not why)
        return Counter(why for _, why in judged if why)

    def retire(self, successor: Judge, reason: str) -> None:
        """The judge ends with its next judgement, which may be much later; another one goes on."""
        self._retired.append((self.judge, reason))
        self._waiting.clear()
        self.past, self.judge, self.snapshot = self.judge, successor, JudgeSnapshot()

    def is_due(self, now: float) -> bool:
        """Whether there is work: new data, ended rounds, or windows that may be overdue."""
        if self._waiting or self._retired:
            return True
        grace_s = self.judge.rules.grace_s
        pause_s = grace_s / _LOOKS_FOR_OVERDUE
        may_be_open = now - self._heard_at <= grace_s + 2 * pause_s
        return may_be_open and now - self._judged_at >= pause_s

    def next_judgement(
        self, stragglers: Collection[KnownStraggler], window_s: float, *, is_watched: bool
    ) -> JobJudgement:
        """Return the next work for a judge."""
        if self._retired:
            judge, reason = self._retired.popleft()
            return JobJudgement(judge=judge, ending=reason)
        count = min(_WINDOWS_AT_ONCE, len(self._waiting))
        heard = [self._waiting.popleft() for _ in range(count)]
        return JobJudgement(
            judge=self.judge, before=self.snapshot, heard=heard, stragglers=stragglers,
            window_s=window_s, is_watched=is_watched,
        )  # fmt: skip

    def finish(self, judgement: JobJudgement, outcome: JudgementOutcome, now: float) -> None:
        """A judgement is finished. If its judge was replaced meanwhile, its snapshot is dropped."""
        self._judged_at = now
        if judgement.judge is self.judge:
            self.snapshot = outcome.snapshot
            self.has_news = self.has_news or bool(judgement.heard)


class JudgedJob(Protocol):
    """A job whose judgements are run."""

    job: str
    work: JobWork

    def next_judgement(self) -> JobJudgement: ...
    def take(self, judgement: JobJudgement, outcome: JudgementOutcome, now: float) -> None: ...


class JudgementRunner:
    """Runs the judgements of all jobs, at most one at a time for each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._few = asyncio.Semaphore(_JOBS_AT_ONCE)
        self._input_failures = InputFailures("the judge")

    @property
    def failures(self) -> int:
        """How many judgements, or messages within them, have failed."""
        return self._input_failures.failures

    def begin(self, job: JudgedJob, tasks: asyncio.TaskGroup) -> None:
        """Begin the job's next judgement, unless one is running."""
        if not job.work.is_running:
            job.work.is_running = True
            tasks.create_task(self._run(job), name=f"judgement-{job.job}")

    async def _run(self, job: JudgedJob) -> None:
        try:
            with self._input_failures.caught("a judgement"):
                async with self._few, job.work.lock:
                    judgement, now = job.next_judgement(), self._clock.now()
                    outcome = await asyncio.to_thread(judgement.run, now)
                    job.take(judgement, outcome, now)
                for error in outcome.failures:
                    self._input_failures.note("a window", error)
        finally:
            job.work.is_running = False

    async def ask(self, job: JudgedJob, question: Callable[[Judge], T]) -> T:
        """Return the answer of a job's judge, which is asked between two judgements."""
        async with job.work.lock:
            return await asyncio.to_thread(question, job.work.judge)

    async def ask_of_past(self, job: JudgedJob, question: Callable[[Judge], T]) -> T:
        """The same, of the judge before if this one knows nothing yet."""
        async with job.work.lock:
            work = job.work
            judge = work.past if work.past and work.judge.round is None else work.judge
            return await asyncio.to_thread(question, judge)
