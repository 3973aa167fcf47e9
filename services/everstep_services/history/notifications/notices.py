"""Which notices facts make, when each is sent to which target, and when it is done with. Pure."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Literal, get_args

from msgspec.structs import replace

from everstep.ids import id_from
from everstep.messages import (
    ActionDecided,
    BreakerClosed,
    BreakerOpened,
    Fact,
    IncidentClosed,
    IncidentExtended,
    IncidentOpened,
    JobEnded,
    NodeExcluded,
    NodeIncluded,
    OperatorActed,
    StragglerCleared,
    StragglerFound,
    VerdictReached,
)
from everstep.messages.documents.notices import (
    Notice,
    NoticesDocument,
    TargetState,
    ToldGroup,
)
from everstep.observe.redaction import redact
from everstep.slow_rank_causes import SlowRankCause
from everstep.subjects import CLUSTER
from everstep.verdict_causes import VERDICT_CAUSES

Event = Literal[
    "incident", "job_failed", "job_stopped", "slow_rank", "node_excluded", "breaker_open"
]
EVENTS: Final[tuple[Event, ...]] = (
    "incident",
    "job_failed",
    "job_stopped",
    "slow_rank",
    "node_excluded",
    "breaker_open",
)
Step = Literal["firing", "update", "resolved"]
"""What a message says: it began, its cause is another one, it is over."""

NOTICES_MOST: Final = 500
_FINISHED_MOST = 2000
_STOPPED_MOST = 200
_NAMES_MOST = 16
_TEXT_MOST = 600
_READ_MOST = 4096
_ONCE: Final = frozenset({"job_failed", "job_stopped"})
"""Events that are never over."""
_CAUSES: Final = frozenset({"", *VERDICT_CAUSES, *get_args(SlowRankCause)})
"""Other words count as one cause: a job that makes causes up gets no further messages."""
_BY_PEOPLE = frozenset({"rest", "cli", "script"})


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
    return next((one for one in notice.targets if one.target == target), None)


def next_step(notice: Notice, target: str, updates_most: int) -> Step | None:
    """The next message for a target."""
    told = told_to(notice, target)
    if notice.state == "firing":
        if told is None:
            return "firing"
        has_other_cause = told.state == "firing" and told.cause != notice.cause
        return "update" if has_other_cause and told.updates < updates_most else None
    if notice.state == "resolved" and (told is None or told.state == "firing"):
        return "resolved"
    return None


class Notices:
    """All open notices. `now` is in seconds since 1970, and never jumps while one replica sends."""

    def __init__(self, rules: Rules, document: NoticesDocument, now: float) -> None:
        self._rules = rules
        self._began_s = min(document.began_s or now, now)
        self._notices = {one.id: _not_after(one, now) for one in document.notices}
        self._told = {one.group: min(one.sent_s, now) for one in document.told}
        self._finished = dict.fromkeys(document.finished)
        self._stopped = dict.fromkeys(document.stopped)
        self.cooled = 0
        """Notices that were sent with another one."""
        self.dropped = 0
        """Notices that were too many."""
        self.is_changed = False
        """Something must be written before it is sent."""

    def __len__(self) -> int:
        return len(self._notices)

    def get(self, id_: str) -> Notice | None:
        """An open notice."""
        return self._notices.get(id_)

    def all(self) -> tuple[Notice, ...]:
        """The open notices, the oldest first."""
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
        )

    def drop_oldest(self) -> bool:
        """Forget the oldest notice, where all of them are too large; False if there is none."""
        if not self._notices:
            return False
        self._finish(next(iter(self._notices)))
        self.dropped += 1
        return True

    # --- facts ---

    def take(self, fact: Fact, now: float) -> None:
        """Add what a fact says."""
        if (taken := self.TAKEN.get(type(fact))) is not None:
            taken(self, fact, now)

    def _opened(self, fact: IncidentOpened, now: float) -> None:
        id_ = _incident_id(fact)
        known = self._notice(id_, fact, now, "incident", fact.incident)
        if known is None or known.began_at is not None:
            return
        self._put(
            replace(
                known,
                state="held",
                began_at=fact.at,
                reason=_bounded(fact.reason),
                ranks=known.ranks or (() if fact.rank is None else (fact.rank,)),
                nodes=known.nodes or (() if fact.node is None else (fact.node,)),
            )
        )

    def _extended(self, fact: IncidentExtended, now: float) -> None:
        known = self._notice(_incident_id(fact), fact, now, "incident", fact.incident)
        if known is not None and fact.ranks > known.affected:
            self._put(replace(known, affected=fact.ranks))

    def _judged(self, fact: VerdictReached, now: float) -> None:
        known = self._notice(_incident_id(fact), fact, now, "incident", fact.incident)
        if known is None or fact.revision <= known.revision:
            return
        judged = replace(
            known,
            revision=fact.revision,
            cause=fact.cause,
            verdict=_bounded(fact.reason),
            confidence=fact.confidence,
            ranks=fact.culprit_ranks[:_NAMES_MOST] or known.ranks,
            nodes=fact.culprit_nodes[:_NAMES_MOST] or known.nodes,
        )
        self._put(judged)
        if judged.state == "firing":
            self._told[_group(judged)] = now

    def _decided(self, fact: ActionDecided, now: float) -> None:
        if fact.incident is None or fact.mode != "enforce":
            return
        id_ = f"{fact.job}/{fact.incident}"
        known = self._notice(id_, fact, now, "incident", fact.incident)
        if known is not None:
            self._put(replace(known, action=_bounded(f"{fact.action}: {fact.reason}")))

    def _closed(self, fact: IncidentClosed, now: float) -> None:
        known = self._notice(_incident_id(fact), fact, now, "incident", fact.incident)
        if known is None or known.outcome:
            return
        lost_s = fact.ledger.wall_s + fact.lost_s
        self._end(
            replace(
                known,
                outcome=fact.outcome or "closed",
                ended_at=fact.at,
                ending=_bounded(fact.reason),
                lost_s=lost_s,
                lost_steps=fact.lost_steps,
            )
        )

    def _job_ended(self, fact: JobEnded, now: float) -> None:
        if fact.state not in {"failed", "stopped"}:
            return
        id_ = f"{fact.job}/ended/{fact.id}"
        if fact.state == "stopped" and fact.job in self._stopped:
            del self._stopped[fact.job]  # the next run under this name may stop by itself
            self._finish(id_)
            return
        known = self._notice(id_, fact, now, f"job_{fact.state}", fact.job)
        if known is None or known.began_at is not None:
            return
        incident = fact.incident or ""
        reason = _bounded(fact.reason)
        self._put(replace(known, state="held", began_at=fact.at, reason=reason, incident=incident))

    def _operated(self, fact: OperatorActed, now: float) -> None:
        del now
        is_stop = fact.action == "stop_job" and fact.outcome == "accepted"
        if not is_stop or fact.origin not in _BY_PEOPLE or _hashed(fact.id) in self._finished:
            return
        self._remember(fact.id)
        for one in self.all():
            if (one.event, one.job, one.state) == ("job_stopped", fact.job, "held"):
                self._finish(one.id)
                return
        self._stopped[fact.job] = None
        _cut(self._stopped, _STOPPED_MOST)

    def _found(self, fact: StragglerFound, now: float) -> None:
        known = self._notice(_finding_id(fact.job, fact.id), fact, now, "slow_rank", fact.id)
        if known is None or known.began_at is not None:
            return
        if known.outcome:  # heard in the wrong order
            self._finish(known.id)
            return
        self._put(
            replace(
                known, state="held", began_at=fact.at, reason=_bounded(fact.reason),
                cause=fact.cause, ranks=(fact.rank,), nodes=(fact.node,),
                confidence=fact.confidence, cost_ratio=fact.slowdown_ratio,
            )
        )  # fmt: skip

    def _cleared(self, fact: StragglerCleared, now: float) -> None:
        known = self._notice(
            _finding_id(fact.job, fact.finding), fact, now, "slow_rank", fact.finding
        )
        if known is None or known.outcome:
            return
        if known.state == "held":  # it did not last long enough
            self._finish(known.id)
            return
        self._end(
            replace(
                known, outcome="cleared", ended_at=fact.at, ending=_bounded(fact.reason),
                lost_s=fact.lost_s,
            )
        )  # fmt: skip

    def _excluded(self, fact: NodeExcluded, now: float) -> None:
        if fact.mode != "enforce" or fact.job != CLUSTER:
            return
        id_ = f"{fact.job}/excluded/{fact.id}"
        known = self._notice(id_, fact, now, "node_excluded", fact.node)
        if known is None or known.began_at is not None:
            return
        for_s = "" if fact.ttl_s is None else f" for {fact.ttl_s:g} s"
        self._put(
            replace(
                known, state="held", began_at=fact.at, reason=_bounded(fact.reason),
                nodes=(fact.node,), action=_bounded(f"excluded by {fact.by}{for_s}"),
            )
        )  # fmt: skip

    def _included(self, fact: NodeIncluded, now: float) -> None:
        self._end_all(fact, "node_excluded", fact.node, "included", now)

    def _breaker_opened(self, fact: BreakerOpened, now: float) -> None:
        if fact.job != CLUSTER:
            return
        id_ = f"{fact.job}/breaker/{fact.id}"
        known = self._notice(id_, fact, now, "breaker_open", "")
        if known is not None and known.began_at is None:
            reason = _bounded(fact.reason)
            self._put(replace(known, state="held", began_at=fact.at, reason=reason))

    def _breaker_closed(self, fact: BreakerClosed, now: float) -> None:
        self._end_all(fact, "breaker_open", "", "closed", now)

    def _end_all(
        self, fact: NodeIncluded | BreakerClosed, event: Event, subject: str, outcome: str,
        now: float,
    ) -> None:  # fmt: skip
        """What began before this fact is over. A second copy of the fact ends nothing."""
        del now
        if fact.job != CLUSTER or _hashed(fact.id) in self._finished:
            return
        self._remember(fact.id)
        for one in self.all():
            if (one.event, one.subject) == (event, subject) and not one.outcome:
                reason = _bounded(fact.reason)
                self._end(replace(one, outcome=outcome, ended_at=fact.at, ending=reason))

    # --- time ---

    def advance(self, now: float) -> None:
        """Let go what has been held for long enough, and forget what is done with."""
        self._forget(now)
        groups: dict[str, list[Notice]] = {}
        held_notices = [one for one in self.all() if one.state == "held"]
        told_with_job = {f"{one.job}/{one.incident}" for one in held_notices if one.incident}
        for one in held_notices:
            if one.id not in told_with_job:
                groups.setdefault(_group(one), []).append(one)
        # A job's end first: it takes the incident that ended the job with it.
        for name in sorted(groups, key=lambda group: not group.startswith("job_")):
            held = [one for one in groups[name] if one.id in self._notices]
            if held and now >= self._due_s(name, held[0]):
                due = [one for one in held if now - one.heard_s >= self._hold_s(one)]
                self._release(name, due, now)

    def _forget(self, now: float) -> None:
        """Drop what is done with, what never began, and cooldowns that are over."""
        for one in self.all():
            is_stale = one.state == "unheard" and now - one.heard_s > self._rules.stale_after_s
            if is_stale or (one.state in {"firing", "resolved"} and self._is_done(one)):
                self._finish(one.id)
        for name, sent_s in list(self._told.items()):
            if now - sent_s > self._rules.cooldown_s:
                del self._told[name]

    def deliveries(self, target: str) -> Iterator[Delivery]:
        """The messages for a target, the oldest notice first."""
        most = self._rules.updates_most.get(target, 0)
        for one in self._notices.values():
            if (step := next_step(one, target, most)) is not None:
                yield Delivery(target, step, one)

    def delivered(self, delivery: Delivery) -> None:
        """A target has taken a message."""
        state = "resolved" if delivery.step == "resolved" else "firing"
        self._note(delivery, state)

    def given_up(self, delivery: Delivery) -> None:
        """A target will not take a message. An update that it refuses is not tried again."""
        self._note(delivery, "firing" if delivery.step == "update" else "given_up")

    def _note(self, delivery: Delivery, state: str) -> None:
        known = self._notices.get(delivery.notice.id)
        if known is None:
            return
        told = TargetState(
            target=delivery.target,
            state=state,
            cause=delivery.notice.cause,
            updates=delivery.told.updates + (delivery.step == "update"),
        )
        others = tuple(one for one in known.targets if one.target != delivery.target)
        self._put(replace(known, targets=(*others, told)))

    # --- within ---

    def _due_s(self, group: str, oldest: Notice) -> float:
        cooled_s = self._told.get(group, float("-inf")) + self._rules.cooldown_s
        return max(oldest.heard_s + self._hold_s(oldest), cooled_s)

    def _hold_s(self, notice: Notice) -> float:
        is_slow_rank = notice.event == "slow_rank"
        return self._rules.slow_rank_after_s if is_slow_rank else self._rules.settle_s

    def _release(self, group: str, due: list[Notice], now: float) -> None:
        """Send the newest of these that lasts, or the newest; its message stands for the others."""
        told = [one for one in due if one.outcome != "merged"]
        for merged in (one for one in due if one.outcome == "merged"):
            self._finish(merged.id)
        if not told:
            return
        if told[0].event not in self._rules.events:
            for one in told:
                self._finish(one.id)
            return
        chosen = next((one for one in reversed(told) if not one.outcome), told[-1])
        others = [one for one in told if one.id != chosen.id]
        for one in others:
            self._finish(one.id)
        self.cooled += len(others)
        more = chosen.more + sum(1 + one.more for one in others)
        since = min((one.more_since_s or one.heard_s for one in others), default=None)
        chosen = self._with_incident(replace(chosen, more=more, more_since_s=since))
        self._put(replace(chosen, state="resolved" if chosen.outcome else "firing"))
        if chosen.event not in _ONCE:
            self._told[group] = now

    def _with_incident(self, notice: Notice) -> Notice:
        """The notice of the incident that ended a job; while held, it is sent with the job's."""
        known = self._notices.get(f"{notice.job}/{notice.incident}")
        if not notice.incident or known is None:
            return notice
        if known.state in {"held", "unheard"}:
            self._finish(known.id)
        return replace(
            notice, cause=known.cause, verdict=known.verdict, confidence=known.confidence,
            ranks=known.ranks, nodes=known.nodes, affected=known.affected, lost_s=known.lost_s,
        )  # fmt: skip

    def _is_done(self, notice: Notice) -> bool:
        """Every target has all that there will be to tell."""
        is_last = notice.event in _ONCE
        states = {one.target: one.state for one in notice.targets}
        ends = {"given_up", "firing"} if is_last else {"given_up", "resolved"}
        return all(states.get(target) in ends for target in self._rules.updates_most)

    def _notice(self, id_: str, fact: Fact, now: float, event: str, subject: str) -> Notice | None:
        """The open notice, or a new one; None where it is done with, or too old to begin."""
        known = self._notices.get(id_)
        if known is not None:
            return known
        if _hashed(id_) in self._finished:
            return None
        oldest_s = max(self._began_s, now - self._rules.stale_after_s)
        if fact.at.timestamp() < oldest_s:
            if isinstance(fact, _BEGINNINGS):
                self._remember(id_)
            return None
        return Notice(
            id=id_, event=event, state="unheard", heard_s=now, job=fact.job, subject=subject
        )

    def _end(self, notice: Notice) -> None:
        """It is over: what was sent will be resolved, what is held is sent as over."""
        is_sent = notice.state == "firing"
        self._put(replace(notice, state="resolved" if is_sent else notice.state))

    def _put(self, notice: Notice) -> None:
        self._notices[notice.id] = notice
        self.is_changed = True
        while len(self._notices) > NOTICES_MOST:
            self.drop_oldest()

    def _finish(self, id_: str) -> None:
        self._notices.pop(id_, None)
        self._remember(id_)

    def _remember(self, id_: str) -> None:
        self._finished[_hashed(id_)] = None
        _cut(self._finished, _FINISHED_MOST)
        self.is_changed = True

    TAKEN: ClassVar[Mapping[type[Fact], Callable[[Any, Any, float], None]]] = {
        ActionDecided: _decided,
        BreakerClosed: _breaker_closed,
        BreakerOpened: _breaker_opened,
        IncidentClosed: _closed,
        IncidentExtended: _extended,
        IncidentOpened: _opened,
        JobEnded: _job_ended,
        NodeExcluded: _excluded,
        NodeIncluded: _included,
        OperatorActed: _operated,
        StragglerCleared: _cleared,
        StragglerFound: _found,
        VerdictReached: _judged,
    }


READ: tuple[type[Fact], ...] = tuple(Notices.TAKEN)
"""The kinds of facts that say something to people."""
_BEGINNINGS = (IncidentOpened, StragglerFound, NodeExcluded, BreakerOpened, JobEnded)


def _incident_id(fact: IncidentOpened | IncidentExtended | IncidentClosed | VerdictReached) -> str:
    return f"{fact.job}/{fact.incident}"


def _finding_id(job: str, finding: str) -> str:
    return f"{job}/slow/{finding}"


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


def _bounded(text: str) -> str:
    """Without secrets: what is cut off later could show the half of one."""
    return redact(text[:_READ_MOST])[:_TEXT_MOST]


def _cut(names: dict[str, None], most: int) -> None:
    while len(names) > most:
        del names[next(iter(names))]


def _hashed(id_: str) -> str:
    return id_from(id_)[:16]
