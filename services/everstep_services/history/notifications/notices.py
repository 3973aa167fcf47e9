"""The open notices: when each is sent to which target, and when it is done with. Pure."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from msgspec.structs import replace

from everstep.ids import id_from
from everstep.messages import (
    AllocationEnded,
    BreakerOpened,
    Fact,
    IncidentOpened,
    JobEnded,
    NodeExcluded,
    StragglerFound,
)
from everstep.messages.documents.notices import (
    FailingTarget,
    Notice,
    NoticesDocument,
    TargetState,
    ToldGroup,
)
from everstep.slow_rank_causes import SlowRankCause
from everstep.verdict_causes import VERDICT_CAUSES

Event = Literal[
    "incident",
    "job_failed",
    "job_stopped",
    "slow_rank",
    "node_drained",
    "node_excluded",
    "breaker_open",
]
EVENTS: Final[tuple[Event, ...]] = get_args(Event)
Step = Literal["firing", "update", "resolved"]
"""What a message says: it began, its cause is another one, it is over."""

NOTICES_MOST: Final = 500
_FINISHED_MOST = 2000
_STOPPED_MOST = 200
_LATE_VERDICT_S: Final = 600.0
"""An incident or a job that is over is kept this long: a verdict may change after the message."""
_SAME_TIME_S: Final = 1.0
"""Two times of one failure differ by less, because each replica has a clock of its own."""
_ONCE: Final = frozenset({"job_failed", "job_stopped"})
"""Events that are never over."""
_CAUSES: Final = frozenset({"", *VERDICT_CAUSES, *get_args(SlowRankCause)})
"""Other words count as one cause: a job that makes causes up gets no further messages."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is sent where, and when."""

    events: frozenset[str]
    updates_most: Mapping[str, int]
    """The targets, and the most messages to each about changed causes."""
    settle_s: float = 5.0
    cooldown_s: float = 300.0
    slow_rank_after_s: float = 300.0
    stale_after_s: float = 3600.0
    """What is heard later than this is history: it begins no notice."""
    corrected: frozenset[str] = frozenset()
    """Targets that get a message about a cause that changed after the incident was over."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message that a target should have."""

    target: str
    step: Step
    notice: Notice

    @property
    def key(self) -> str:
        """The same for each attempt, whichever replica makes it."""
        number = f"-{self.told.updates + 1}" if self.step == "update" else ""
        return f"{self.notice.id}/{self.step}{number}"

    @property
    def told(self) -> TargetState:
        """What the target has of the notice."""
        return told_to(self.notice, self.target) or TargetState(target=self.target, state="")


def told_to(notice: Notice, target: str) -> TargetState | None:
    """What a target has of a notice; None for nothing."""
    return next((state for state in notice.targets if state.target == target), None)


def next_step(notice: Notice, target: str, rules: Rules) -> Step | None:
    """The next message for a target."""
    told = told_to(notice, target)
    if notice.state not in {"firing", "resolved"}:
        return None
    if told is None:
        return "firing" if notice.state == "firing" else "resolved"
    if told.state == "firing" and notice.state == "resolved":
        return "resolved"
    has_other_cause = told.cause != notice.cause
    return "update" if has_other_cause and _may_update(told, notice, rules) else None


def _may_update(told: TargetState, notice: Notice, rules: Rules) -> bool:
    """Whether the target gets a message if the cause changes."""
    if told.state != notice.state:
        return False
    is_over = notice.state == "resolved"
    is_heard = not is_over or (notice.event == "incident" and told.target in rules.corrected)
    return is_heard and told.updates < rules.updates_most.get(told.target, 0)


class Notices:
    """All open notices. `now` is in seconds since 1970, and never jumps while one replica sends."""

    def __init__(self, rules: Rules, document: NoticesDocument, now: float) -> None:
        self._rules = rules
        self._settle_s = rules.settle_s
        self._began_s = min(document.began_s or now, now)
        self._notices = {notice.id: _not_after(notice, now) for notice in document.notices}
        self._told = {sent.group: min(sent.sent_s, now) for sent in document.told}
        self._finished = dict.fromkeys(document.finished)
        self._stopped = dict.fromkeys(document.stopped)
        self._failing = {entry.target: entry.since_s for entry in document.failing}
        self._done_s: dict[str, float] = {}
        """Since when all targets have all of a notice that is kept for a late verdict."""
        self.cooled = 0
        """Notices that were sent with another one."""
        self.dropped = 0
        """Notices that were too many."""
        self.is_changed = False
        """Something must be written before it is sent."""

    def __len__(self) -> int:
        return sum(not self._is_done(notice) for notice in self._notices.values())

    def get(self, id_: str) -> Notice | None:
        """An open notice."""
        return self._notices.get(id_)

    def of_incident(self, job: str, incident: str) -> Notice | None:
        """The notice of the end of a job that is also the message about its last incident."""
        return next(
            (
                notice
                for notice in self._notices.values()
                if notice.has_incident and (notice.job, notice.incident) == (job, incident)
            ),
            None,
        )

    def all(self) -> tuple[Notice, ...]:
        """The open notices and those that a late verdict may change, the oldest first."""
        return tuple(self._notices.values())

    def document(self, stream: str, sequence: int) -> NoticesDocument:
        """What to write."""
        return NoticesDocument(
            stream=stream,
            sequence=sequence,
            began_s=self._began_s,
            notices=tuple(self._notices.values()),
            told=tuple(ToldGroup(group=name, sent_s=at) for name, at in self._told.items()),
            finished=tuple(self._finished),
            stopped=tuple(self._stopped),
            failing=tuple(
                FailingTarget(target=target, since_s=since_s)
                for target, since_s in self._failing.items()
                if target in self._rules.updates_most
            ),
        )

    def drop_oldest(self) -> bool:
        """Forget a notice, where all of them are too large; False if there is none.

        Notices whose messages were all sent go first, and then the oldest.
        """
        if not self._notices:
            return False
        sent = next((notice.id for notice in self.all() if self._is_done(notice)), None)
        self.finish(sent or next(iter(self._notices)))
        self.dropped += sent is None
        return True

    def failing_since(self, target: str) -> float | None:
        """When attempts at this target began to fail; None after a success."""
        return self._failing.get(target)

    def note_failing(self, target: str, since_s: float | None) -> None:
        """Note since when a target fails, for the replica that sends next."""
        before_s = self._failing.get(target)
        if since_s is None:
            self.is_changed |= self._failing.pop(target, None) is not None
        elif before_s is None or abs(since_s - before_s) > _SAME_TIME_S:
            self._failing[target] = since_s
            self.is_changed = True

    # --- time ---

    def stop_settling(self) -> None:
        """Hold no notice for its verdict any more: the process that sends is about to end."""
        self._settle_s = 0.0

    def advance(self, now: float) -> None:
        """Let go what has been held for long enough, and forget what is done with."""
        self._forget(now)
        groups: dict[str, list[Notice]] = {}
        held_notices = [notice for notice in self.all() if notice.state == "held"]
        told_with_job = {
            f"{notice.job}/{notice.incident}" for notice in held_notices if notice.incident
        }
        for notice in held_notices:
            if notice.id not in told_with_job:
                groups.setdefault(_group(notice), []).append(notice)
        ended_jobs = set()
        # A job's end first: it takes the incident that ended the job with it. What else was over
        # before goes out now, too: a message about it must not follow that of the end.
        for name in sorted(groups, key=lambda group: not group.startswith("job_")):
            held = [notice for notice in groups[name] if notice.id in self._notices]
            due = [notice for notice in held if now - notice.heard_s >= self._hold_s(notice)]
            if held and now >= self._due_s(name, held[0]):
                if held[0].event in _ONCE:
                    ended_jobs.add(held[0].job)
            else:
                due = [notice for notice in held if notice.outcome and notice.job in ended_jobs]
            self._release(name, due, now)

    def _forget(self, now: float) -> None:
        """Drop what is done with, what never began, and cooldowns that are over."""
        for notice in self.all():
            is_stale = (
                notice.state == "unheard" and now - notice.heard_s > self._rules.stale_after_s
            )
            if is_stale or (self._is_done(notice) and not self._is_kept(notice, now)):
                self.finish(notice.id)
        for name, sent_s in list(self._told.items()):
            if now - sent_s > self._rules.cooldown_s:
                del self._told[name]

    def deliveries(self, target: str) -> Iterator[Delivery]:
        """The messages for a target, the oldest notice first."""
        for notice in self._notices.values():
            if (step := next_step(notice, target, self._rules)) is not None:
                yield Delivery(target, step, notice)

    def delivered(self, delivery: Delivery) -> None:
        """A target has taken a message."""
        self._note(delivery, delivery.notice.state)

    def given_up(self, delivery: Delivery) -> None:
        """A target will not take a message. An update that it refuses is not tried again."""
        self._note(delivery, delivery.told.state if delivery.step == "update" else "given_up")

    def _note(self, delivery: Delivery, state: str) -> None:
        notice = self._notices.get(delivery.notice.id)
        if notice is None:
            return
        told = TargetState(
            target=delivery.target,
            state=state,
            cause=delivery.notice.cause,
            updates=delivery.told.updates + (delivery.step == "update"),
        )
        others = tuple(target for target in notice.targets if target.target != delivery.target)
        self.put(replace(notice, targets=(*others, told)))

    def _due_s(self, group: str, oldest: Notice) -> float:
        cooled_s = self._told.get(group, float("-inf")) + self._rules.cooldown_s
        return max(oldest.heard_s + self._hold_s(oldest), cooled_s)

    def _hold_s(self, notice: Notice) -> float:
        is_slow_rank = notice.event == "slow_rank"
        return self._rules.slow_rank_after_s if is_slow_rank else self._settle_s

    def _release(self, group: str, due: list[Notice], now: float) -> None:
        """Send the newest of these that lasts, or the newest; its message stands for the others."""
        told = [notice for notice in due if notice.outcome != "merged"]
        for merged in (notice for notice in due if notice.outcome == "merged"):
            self.finish(merged.id)
        if not told:
            return
        if told[0].event not in self._rules.events:
            for notice in told:
                self.finish(notice.id)
            return
        chosen = next((notice for notice in reversed(told) if not notice.outcome), told[-1])
        others = [notice for notice in told if notice.id != chosen.id]
        for notice in others:
            self.finish(notice.id)
        self.cooled += len(others)
        more = chosen.more + sum(1 + notice.more for notice in others)
        since = min((notice.more_since_s or notice.heard_s for notice in others), default=None)
        chosen = self._with_incident(replace(chosen, more=more, more_since_s=since))
        self.put(replace(chosen, state="resolved" if chosen.outcome else "firing"))
        if chosen.event not in _ONCE:
            self._told[group] = now

    def _with_incident(self, notice: Notice) -> Notice:
        """The notice of the incident that ended a job; while held, it is sent with the job's."""
        incident = self._notices.get(f"{notice.job}/{notice.incident}")
        if not notice.incident or incident is None:
            return notice
        has_incident = incident.state in {"held", "unheard"}
        if has_incident:
            self.finish(incident.id)
        return replace(
            notice, cause=incident.cause, verdict=incident.verdict, confidence=incident.confidence,
            ranks=incident.ranks, nodes=incident.nodes, affected=incident.affected,
            lost_s=incident.lost_s, revision=incident.revision, has_incident=has_incident,
            is_inconclusive=incident.is_inconclusive,
        )  # fmt: skip

    def _is_done(self, notice: Notice) -> bool:
        """Every target has all that there is to tell, and the notice is over."""
        if notice.state not in {"firing", "resolved"}:
            return False
        is_last = notice.event in _ONCE
        states = {target.target: target.state for target in notice.targets}
        ends = {"given_up", "firing"} if is_last else {"given_up", "resolved"}
        return all(
            states.get(target) in ends and next_step(notice, target, self._rules) is None
            for target in self._rules.updates_most
        )

    def _is_kept(self, notice: Notice, now: float) -> bool:
        """A target gets one further message if the verdict on this incident still changes."""
        if notice.state != "resolved" and not notice.has_incident:
            return False
        if not any(_may_update(told, notice, self._rules) for told in notice.targets):
            return False
        return now - self._done_s.setdefault(notice.id, now) < _LATE_VERDICT_S

    def open_or_new(
        self, id_: str, fact: Fact, now: float, event: str, subject: str
    ) -> Notice | None:
        """The open notice, or a new one; None where it is done with, or too old to begin."""
        notice = self._notices.get(id_)
        if notice is not None:
            return notice
        if self.is_finished(id_):
            return None
        oldest_s = max(self._began_s, now - self._rules.stale_after_s)
        if fact.at.timestamp() < oldest_s:
            if isinstance(fact, _BEGINNINGS):
                self.remember(id_)
            return None
        return Notice(
            id=id_, event=event, state="unheard", heard_s=now, job=fact.job, subject=subject
        )

    def end(self, notice: Notice) -> None:
        """It is over: what was sent will be resolved, what is held is sent as over."""
        is_sent = notice.state == "firing"
        self.put(replace(notice, state="resolved" if is_sent else notice.state))

    def put(self, notice: Notice) -> None:
        """Keep a notice, or the new state of one; the oldest make room."""
        self._notices[notice.id] = notice
        self.is_changed = True
        while len(self._notices) > NOTICES_MOST:
            self.drop_oldest()

    def is_finished(self, id_: str) -> bool:
        """Whether a notice, or a fact that ended some, is done with."""
        return _hashed(id_) in self._finished

    def finish(self, id_: str) -> None:
        """Forget a notice, and remember that it is done with."""
        self._notices.pop(id_, None)
        self._done_s.pop(id_, None)
        self.remember(id_)

    def remember(self, id_: str) -> None:
        """Remember the id of a notice that is done with, or of a fact that ended some."""
        self._finished[_hashed(id_)] = None
        _cut(self._finished, _FINISHED_MOST)
        self.is_changed = True

    def note_sent(self, notice: Notice, now: float) -> None:
        """Begin the cooldown of its group: similar notices are counted while it lasts."""
        self._told[_group(notice)] = now

    def expect_stop(self, job: str) -> None:
        """A person has stopped this job: no notice is made of its end."""
        self._stopped[job] = None
        _cut(self._stopped, _STOPPED_MOST)

    def take_expected_stop(self, job: str) -> bool:
        """Whether a person has stopped this job; its next run may stop by itself."""
        return self._stopped.pop(job, 0) is None


_BEGINNINGS = (
    AllocationEnded, BreakerOpened, IncidentOpened, JobEnded, NodeExcluded, StragglerFound,
)  # fmt: skip


def _group(notice: Notice) -> str:
    """Notices alike: while one of these is fresh, the others are counted."""
    match notice.event:
        case "incident" | "slow_rank":
            cause = notice.cause if notice.cause in _CAUSES else "other"
            return f"{notice.event} {notice.job} {cause}"
        case "node_excluded":
            return f"{notice.event} {notice.subject}"
        case "breaker_open":
            return notice.event
        case _:
            return f"{notice.event} {notice.id}"


def _not_after(notice: Notice, now: float) -> Notice:
    """Another replica's clock may be ahead of ours: nothing is held for longer than it must be."""
    return notice if notice.heard_s <= now else replace(notice, heard_s=now)


def _cut(names: dict[str, None], most: int) -> None:
    while len(names) > most:
        del names[next(iter(names))]


def _hashed(id_: str) -> str:
    return id_from(id_)[:16]
