"""The jobs that have sent timings, and their state in this replica.

An agent may claim any round, and any slot in it: `FormedRound` is what rendezvous knows.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

from everstep.messages import (
    ControlDocument,
    FaultInjected,
    KnownStraggler,
    Member,
    NodeTimings,
    RoundDocument,
    StragglersDocument,
    SwitchInForce,
)
from everstep.subjects import CLUSTER
from everstep_services.straggler.domain.changes import (
    Change,
    KeepsUp,
    SlowRankFound,
    with_injection,
)
from everstep_services.straggler.domain.findings import blank
from everstep_services.straggler.domain.policy import Policy, StragglerDecision
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.domain.switches import (
    SWITCHED_OFF,
    StragglerSwitches,
    explained,
    in_force,
)
from everstep_services.straggler.domain.verdict import SlownessLimits
from everstep_services.straggler.judgements import (
    JobJudgement,
    JobWork,
    Judge,
    JudgementOutcome,
    JudgeSnapshot,
)
from everstep_services.straggler.settings import StragglerSettings, defaults

NOT_FORMED = "round not formed"
_ROUNDS_KEPT = 2
"""Windows of a round may come when the next one has formed."""


@dataclass(frozen=True, slots=True)
class _Seating:
    """A round that has formed: which node has which slot."""

    world: int
    places: Mapping[int, Member]

    def objection(self, timings: NodeTimings) -> str:
        """Why a window cannot be one of this round; empty if it can."""
        place = self.places.get(timings.slot)
        if place is None or place.node != timings.node:
            return "node without that slot"
        if (timings.slots, timings.world) != (len(self.places), self.world):
            return "another world"
        ranks = range(place.first_rank, place.first_rank + place.ranks)
        return "" if all(rank.rank in ranks for rank in timings.ranks) else "rank of another node"


class FormedRound:
    """The newest rounds of a job."""

    def __init__(self) -> None:
        self.newest: int | None = None
        """None where rendezvous knows nothing of the job: another launcher has started it."""
        self.read_at = -math.inf
        self.is_outdated = False
        """Whether a message named an unknown round, so that the document must be read again."""
        self._seatings: dict[int, _Seating] = {}

    def see(self, document: RoundDocument | None, now: float) -> None:
        """Take the document of rendezvous."""
        self.newest, self.read_at = None if document is None else document.round, now
        if document is None:
            self._seatings = {}
            return
        seating = _seating(document)
        if seating is not None:
            self._seatings[document.round] = seating
            kept = sorted(self._seatings)[-_ROUNDS_KEPT:]
            self._seatings = {number: self._seatings[number] for number in kept}

    def is_before(self, round_: int) -> bool:
        """Whether that round has not formed, as far as is known."""
        return self.newest is not None and round_ > self.newest

    def has_seat(self, round_: int, node: str) -> bool:
        """Whether a node has a slot in a round that is known."""
        seating = self._seatings.get(round_)
        return seating is not None and any(seat.node == node for seat in seating.places.values())

    def objection(self, timings: NodeTimings) -> str:
        """Why a window cannot be of a node of the job; empty if it can."""
        if self.newest is None:
            return ""
        seating = self._seatings.get(timings.round)
        if seating is not None:
            return seating.objection(timings)
        if timings.round < self.newest:
            return "stale round"
        self.is_outdated = True
        return NOT_FORMED


def _seating(document: RoundDocument) -> _Seating | None:
    """None while the slots are not given."""
    members = document.members
    return (
        _Seating(document.world_size, {member.slot: member for member in members})
        if members
        else None
    )


_JOBS_MOST = 1000
_PAST_MOST = 8
_WAITING_MOST = 5000
AFTERMATH_S = 30.0
"""How long after the end of a job its agents may still send earlier measurements."""


MakeJudge = Callable[[str, LiveRules], Judge]


class InjectedFaults:
    """The newest fault that somebody made in each rank of the newest round, on purpose."""

    def __init__(self) -> None:
        self._newest: dict[tuple[int, int], tuple[FaultInjected, float]] = {}
        """By round and rank, with the end of the fault."""

    def note(self, fault: FaultInjected, now: float) -> None:
        """Somebody makes a fault."""
        if fault.round is None or fault.rank is None:
            return
        until = now + (math.inf if fault.lasts_s is None else fault.lasts_s)
        newest = {key: entry for key, entry in self._newest.items() if key[0] >= fault.round}
        self._newest = {**newest, (fault.round, fault.rank): (fault, until)}

    def explain(self, finding: SlowRankFound, now: float, window_s: float) -> SlowRankFound:
        """The finding, made by the fault that lasted while its windows did."""
        fault, until = self._newest.get((finding.round, finding.rank), (None, 0.0))
        if fault is None or now > until + finding.windows * window_s:
            return finding
        return with_injection(finding, fault)


class TrackedJob:
    """One job: its judge, its document as of one revision, and the changes to write."""

    def __init__(
        self,
        job: str,
        make_judge: Callable[[StragglerSwitches], Judge],
        switches: StragglerSwitches,
        now: float,
        most_waiting: int,
    ) -> None:
        self.job = job
        self._make_judge = make_judge
        self.switches = switches
        self.work = JobWork(make_judge(switches), most_waiting)
        self.policy, self.formed, self.faults = Policy(), FormedRound(), InjectedFaults()
        self.document, self.revision = blank(job), 0
        self.is_removed = True
        """There is no document, or not any more."""
        self.is_primed = False
        """Its documents were read: nothing is judged or written before."""
        self.heard_at = now
        self.decisions: list[StragglerDecision] = []
        """Decisions of the policy that no replica has claimed yet."""
        self.over = ""
        """Why no finding can stay open, such as the end of the job; empty while the job goes on."""
        self.is_gone = False
        """Whether to forget the job once its findings are cleared."""
        self.ended_at: float | None = None
        """When the news of its end came."""
        self._ended_round = 0
        self._counted = (-1, False)
        """The newest round, and whether its windows are by time."""
        self.steps_since: float | None = None
        """Since when a window has this number of steps."""
        self.changes: deque[Change] = deque(maxlen=_WAITING_MOST)
        """Changes by the judge that are not in the document yet."""
        self.unrecorded: dict[str, float] = {}
        """Since when a fact stands in the outbox, by its text."""
        self._slow: set[tuple[int, int]] = set()
        self._refused: Counter[str] = Counter()

    @property
    def refused(self) -> Counter[str]:
        """Messages and values that were refused, by reason."""
        return Counter(self._refused)

    @property
    def stragglers(self) -> tuple[KnownStraggler, ...]:
        """The open findings of its round."""
        return tuple(
            straggler for straggler in self.document.found if straggler.round == self.snapshot.round
        )

    def hear(self, timings: NodeTimings, now: float) -> None:
        """Take the window of a node in."""
        if self.is_in_aftermath(now) and timings.round <= self._ended_round:
            self._refused["job ended"] += 1
            return
        objection = self.formed.objection(timings) if self.is_primed else ""
        if objection:
            self._refused[objection] += 1
            return
        self.heard_at = now
        if not self._is_counted_alike(timings):
            self._refused["counted by others"] += 1
            return
        if not self.switches.is_on:
            self._refused["switched off"] += 1
            return
        self.over, self.is_gone, self.ended_at = "", False, None
        if not self.work.put(timings, now):
            self._refused["too many wait"] += 1

    def _is_counted_alike(self, timings: NodeTimings) -> bool:
        """False for a window by time where another node counts steps; that count begins anew."""
        round_, is_by_time = self._counted
        if timings.round > round_:
            self._counted = timings.round, timings.is_by_time
        elif timings.round == round_ and is_by_time and not timings.is_by_time:
            self._counted = round_, False
            self._begin_anew("its steps are counted from here on")
        return not timings.is_by_time or self.is_by_time

    @property
    def is_by_time(self) -> bool:
        """Whether windows are seconds, because nobody counts steps."""
        return self._counted[1]

    def expect(self, round_: int) -> None:
        """A message names this round as formed: the document of rendezvous must confirm it."""
        if self.formed.newest is None or self.formed.is_before(round_):
            self.formed.is_outdated = True

    def see_round(self, document: RoundDocument | None, now: float) -> None:
        """Take the document of rendezvous. Timings of nodes outside of its round are dropped."""
        self.formed.see(document, now)
        self._refused += self.work.forget(self.formed.objection)
        if self.formed.is_before(self.snapshot.round or 0):
            self._refused[NOT_FORMED] += 1
            self._begin_anew(NOT_FORMED)

    def refuse(self, change: Change, reason: str) -> None:
        """Drop a waiting change that can never be written."""
        self.changes.remove(change)
        self._refused[reason] += 1

    def is_in_aftermath(self, now: float) -> bool:
        """Whether the job ended a moment ago."""
        return self.ended_at is not None and now - self.ended_at < AFTERMATH_S

    @property
    def snapshot(self) -> JudgeSnapshot:
        """What its judge knew at the end of its last judgement."""
        return self.work.snapshot

    def next_judgement(self) -> JobJudgement:
        """Return the next work for its judge."""
        # Findings of other replicas are complete once our own changes are written.
        written = () if self.changes else self.document.found
        open_ = [
            straggler
            for straggler in written
            if (straggler.round, straggler.rank) not in self._slow
        ]
        return self.work.next_judgement(open_, self.switches.window_s, is_watched=bool(self._slow))

    def take(self, judgement: JobJudgement, outcome: JudgementOutcome, now: float) -> None:
        """A judgement is finished."""
        self._refused += outcome.refused
        self._slow |= {(straggler.round, straggler.rank) for straggler in outcome.adopted}
        self._note(outcome.changes, now)
        self.work.finish(judgement, outcome, now)

    def end(self, reason: str) -> None:
        """Close all findings for this reason. Later windows are judged anew."""
        self.over = reason
        self._ended_round = self.work.newest_round or 0
        self._begin_anew(reason)

    def see(self, document: StragglersDocument | None, revision: int, now: float) -> None:
        """Take the document as of a revision."""
        new = document or blank(self.job)
        if new.window_steps != self.document.window_steps:
            self.steps_since = now
        self.document, self.revision = new, revision
        self.is_removed = document is None

    def follow(self, switches: StragglerSwitches, rules: LiveRules) -> None:
        """Judge by these switches from now on."""
        was_on, self.switches = self.switches.is_on, switches
        if was_on and not switches.is_on:
            self.end(SWITCHED_OFF)
        self.work.judge.rules = rules

    def _begin_anew(self, reason: str) -> None:
        self.work.retire(self._make_judge(self.switches), reason)

    def _note(self, changes: Iterable[Change], now: float) -> None:
        for made in changes:
            change = made
            if isinstance(made, SlowRankFound):
                change = self.faults.explain(made, now, self.switches.window_s)
            self.changes.append(change)
            if isinstance(change, SlowRankFound) and not change.is_design:
                self._slow.add((change.round, change.rank))
            elif isinstance(change, KeepsUp) and not change.is_design:
                self._slow.discard((change.round, change.rank))


class Jobs:
    """All jobs, and the switches in force for each."""

    def __init__(self, settings: StragglerSettings, make_judge: MakeJudge) -> None:
        self._settings = settings
        self._make_judge = make_judge
        self._default = defaults(settings)
        self._jobs: dict[str, TrackedJob] = {}
        self._past: dict[str, TrackedJob] = {}
        """The last jobs that are over: their windows can still be looked at."""
        self._controls: dict[str, ControlDocument] = {}
        self.refused: Counter[str] = Counter()
        """The refusals of jobs that are forgotten."""

    def __iter__(self) -> Iterator[TrackedJob]:
        return iter(list(self._jobs.values()))

    def __len__(self) -> int:
        return len(self._jobs)

    def get(self, job: str) -> TrackedJob | None:
        """Return the job; None if it has sent nothing."""
        return self._jobs.get(job)

    def past(self, job: str) -> TrackedJob | None:
        """Return a job that is over, and is still remembered."""
        return None if job in self._jobs else self._past.get(job)

    def track(self, job: str, now: float) -> TrackedJob | None:
        """Return the job, and track it if it is new; None if there are too many."""
        tracked = self._jobs.get(job)
        if tracked is None and len(self._jobs) < _JOBS_MOST:
            make_judge = partial(self._judge, job)
            tracked = self._jobs[job] = TrackedJob(
                job, make_judge, self.switches(job), now, self._settings.inbox_windows
            )
        return tracked

    def _judge(self, job: str, switches: StragglerSwitches) -> Judge:
        return self._make_judge(job, self._rules(switches))

    def _rules(self, switches: StragglerSwitches) -> LiveRules:
        """The rules of a judge: a finding is cleared at half of the limit that it was found at."""
        ratio = switches.slower_ratio
        limits = SlownessLimits(found_ratio=ratio, cleared_ratio=ratio / 2)
        return LiveRules(limits=limits, grace_s=self._settings.grace_s)

    def forget(self, job: str) -> None:
        """Forget a job that is over."""
        gone = self._jobs.pop(job, None)
        if gone is not None:
            self.refused += gone.refused
            self._past.pop(job, None)
            self._past[job] = gone
            if len(self._past) > _PAST_MOST:
                del self._past[next(iter(self._past))]

    def switches(self, job: str) -> StragglerSwitches:
        """Return the switches in force for a job."""
        return in_force(self._default, self._controls.get(CLUSTER), self._controls.get(job))

    def explained(
        self, cluster: ControlDocument | None, job: ControlDocument | None
    ) -> tuple[SwitchInForce, ...]:
        """Return every switch, and where its value is from, according to these documents."""
        return explained(self._default, cluster, job)

    def control(self, key: str, document: ControlDocument | None) -> None:
        """Take changed switches of a job, or of all jobs."""
        if document is None:
            self._controls.pop(key, None)
        else:
            self._controls[key] = document
        for job in self:
            if key in {CLUSTER, job.job}:
                switches = self.switches(job.job)
                job.follow(switches, self._rules(switches))
