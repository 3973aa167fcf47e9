"""How the domain's changes alter a job's document, and which facts they make. Pure.

The document lists the open findings. The replica that writes a change of it records the facts,
so any number of replicas with the same data make one fact.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.messages import (
    Fact,
    KnownStraggler,
    StepTimeShifted,
    StragglerCleared,
    StragglerFound,
    StragglersDocument,
)
from everstep.messages.base import Time, shared
from everstep.messages.codec import BadMessageError, encode, envelope
from everstep.slow_rank_causes import meaning_of
from everstep_services.straggler.domain.changes import (
    Change,
    Cost,
    KeepsUp,
    SlowRankFound,
    StepsShifted,
)
from everstep_services.straggler.domain.policy import Action
from everstep_services.straggler.domain.switches import StragglerSwitches

SOURCE = "straggler"
STEPS = 16
"""The steps of a window that agents measure while there is no document."""
_FOUND_MOST = 1000
_REASON_MOST = 300
_FACT_REASON_MOST = 2000
_CLEARED_AT_ONCE = 100
_SAME_SHIFT_WINDOWS = 3
"""Two replicas may find the same shift this many windows apart."""


@dataclass(frozen=True, slots=True)
class FindingContext:
    """The time, and the newest round of the job."""

    wall: Time
    round: int | None
    """Its newest round; None if nobody knows."""
    derive: Callable[..., str]
    """Makes the same id from the same parts in every replica, and nowhere else."""

    def since_s(self, then: Time) -> float:
        """The seconds since `then`."""
        return max(0.0, (self.wall - then).total_seconds())


@dataclass(frozen=True, slots=True)
class Revision:
    """A document, and the facts that it makes."""

    document: StragglersDocument
    facts: Sequence[Fact] = ()


def blank(job: str) -> StragglersDocument:
    """The document of a job before the first write: agents measure, and no rank is slow."""
    return StragglersDocument(job=job, is_on=True, window_steps=STEPS)


def revised(
    before: StragglersDocument, changes: Iterable[Change], now: FindingContext, over: str = ""
) -> Revision:
    """The document after these changes. With `over`, the reason, no finding stays open."""
    draft, taken = _Draft(before, now), list(changes)
    for change in taken:
        if isinstance(change, Cost):
            draft.count(change)  # before its round may end
    draft.enter(now.round)
    for change in taken:
        draft.take(change)
    if over:
        draft.clear(list(draft.stragglers.values()), over)
    document = draft.document()
    kept = tuple(encode(fact).decode() for fact in draft.facts)
    return Revision(replace(document, outbox=before.outbox + kept), draft.facts)


def measured(
    before: StragglersDocument, switches: StragglerSwitches, suggested: int | None
) -> StragglersDocument:
    """The document with how agents measure from now on; `suggested` steps make a window."""
    return replace(
        before,
        is_on=switches.is_on,
        is_cpu_timed=switches.is_cpu_timed,
        window_steps=switches.window_steps or suggested or before.window_steps,
    )


def recorded(before: StragglersDocument, ids: Collection[str]) -> StragglersDocument:
    """The document once the facts with these ids are on record."""
    kept = tuple(text for text in before.outbox if _fact_id(text) not in ids)
    return replace(before, outbox=kept)


def acted(
    before: StragglersDocument, finding: str, action: Action, fact: Fact
) -> StragglersDocument | None:
    """The document with this decision; None if another replica was first.

    `fact` is recorded if this replica ends before it knows the outcome.
    """
    straggler = next(
        (candidate for candidate in before.found if candidate.finding == finding), None
    )
    if straggler is None or action in straggler.acted:
        return None
    new = replace(straggler, acted=(*straggler.acted, action))
    stragglers = tuple(new if other is straggler else other for other in before.found)
    return replace(before, found=stragglers, outbox=(*before.outbox, encode(fact).decode()))


class _Draft:
    """A document that takes changes, one after the other."""

    def __init__(self, before: StragglersDocument, now: FindingContext) -> None:
        self._before = before
        self._now = now
        self.facts: list[Fact] = []
        self.stragglers = {_key(straggler): straggler for straggler in before.found}
        self._round = before.round
        self._shifted_step = before.shifted_step

    def document(self) -> StragglersDocument:
        """The document with the changes so far."""
        stragglers = tuple(self.stragglers[key] for key in sorted(self.stragglers))
        return replace(
            self._before, round=self._round, found=stragglers, shifted_step=self._shifted_step
        )

    def take(self, change: Change) -> None:
        """Take one change; a change that another replica has written alters nothing."""
        self.enter(change.round)
        if change.round != self._round:
            return
        match change:
            case SlowRankFound():
                self._slow(change)
            case KeepsUp():
                straggler = self.stragglers.get((change.round, change.rank, change.is_design))
                if straggler is not None and not _is_older(change, straggler):
                    self.clear([straggler], change.reason)
            case Cost():
                self.count(change)
            case StepsShifted():
                self._shifted(change)

    def count(self, change: Cost) -> None:
        """Add what a finding cost, for the steps that no replica has counted yet."""
        key = change.round, change.rank, change.is_design
        straggler = self.stragglers.get(key)
        if straggler is None or change.last_step <= straggler.counted_step:
            return
        steps = change.last_step - change.first_step + 1
        uncounted = min(steps, change.last_step - straggler.counted_step)
        lost_s = straggler.lost_so_far_s + change.lost_s * uncounted / steps
        self.stragglers[key] = replace(
            straggler, lost_so_far_s=lost_s, counted_step=change.last_step
        )

    def clear(self, stragglers: Iterable[KnownStraggler], reason: str) -> None:
        """Clear findings; if there are many, the rest follows with the next write."""
        for straggler in list(stragglers)[:_CLEARED_AT_ONCE]:
            del self.stragglers[_key(straggler)]
            self._record(
                StragglerCleared,
                straggler,
                id=self._id("cleared", straggler.finding),
                reason=reason,
                lasted_s=round(self._now.since_s(straggler.found_at), 3),
                lost_s=round(straggler.lost_so_far_s, 3) if straggler.counted_step else None,
            )

    def enter(self, round_: int | None) -> None:
        """A newer round has begun: findings of the one before are over."""
        if round_ is not None and (self._round is None or round_ > self._round):
            self._round, self._shifted_step = round_, 0
        if self._round is not None:
            old = [
                straggler for straggler in self.stragglers.values() if straggler.round < self._round
            ]
            self.clear(old, "its round ended")

    def _slow(self, change: SlowRankFound) -> None:
        key = _key(change)
        if key in self.stragglers or len(self.stragglers) >= _FOUND_MOST:
            return
        kind = "uneven" if change.is_design else "slow"
        finding = self._id(kind, self._before.job, change.round, change.rank, change.last_step)
        self.stragglers[key] = KnownStraggler(
            **{
                **shared(KnownStraggler, change),
                "finding": finding,
                "found_at": self._now.wall,
                "reason": change.reason[:_REASON_MOST],
                "lost_so_far_s": max(change.lost_s, 0.0)
                * (change.last_step - change.first_step + 1),
                "counted_step": change.last_step,
            }
        )
        self._record(
            StragglerFound,
            change,
            id=finding,
            reason=change.reason[:_FACT_REASON_MOST],
            failure_class=meaning_of(change.cause).helps,
        )

    def _shifted(self, change: StepsShifted) -> None:
        apart = _SAME_SHIFT_WINDOWS * self._before.window_steps
        if self._shifted_step and abs(change.step - self._shifted_step) <= apart:
            return
        self._shifted_step = change.step
        shift = self._id("shifted", self._before.job, change.round, change.step)
        self._record(StepTimeShifted, change, id=shift)

    def _record(self, kind: type[Fact], of: object, **more: object) -> None:
        """Record a fact with the fields of a change, or of a straggler, and with `more`."""
        head = {"job": self._before.job, "at": self._now.wall, "source": SOURCE}
        self.facts.append(kind(**{**shared(kind, of), **head, **more}))

    def _id(self, *parts: object) -> str:
        return self._now.derive(*map(str, parts))


def _key(finding: KnownStraggler | SlowRankFound) -> tuple[int, int, bool]:
    """Round, rank, and whether the finding is about its role: a rank may have one of each kind."""
    return finding.round, finding.rank, finding.cause == "design"


def _is_older(change: KeepsUp, straggler: KnownStraggler) -> bool:
    """The change was seen before the finding, as by a replica that was stopped for a while."""
    return change.last_step is not None and change.last_step < straggler.last_step


def _fact_id(text: str) -> str:
    try:
        return envelope(text.encode()).id
    except BadMessageError:
        return ""
