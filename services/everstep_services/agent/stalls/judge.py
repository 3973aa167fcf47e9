"""Judges the ranks of one round: which have stalled, which move again, and when to look next.

Pure: `look` takes the pages and `now`, and returns what is new. A judge lives for one round:
nothing that it knows reaches the next.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from everstep_services.agent.stalls.limits import StallLimits
from everstep_services.agent.stalls.position import LONG, Exempt, RankPosition, position_of
from everstep_services.agent.stalls.rank_view import RankView

WatchState = Literal["", "armed", "learning", "paused"]
"""Whether stalls are looked for, as in `watch_changed`; empty while no ranks run."""

_PAUSE_S = 60.0
"""After this time another node may ask again, if a pause has no end."""


def excuse_s(
    stalled: RankPosition, other: RankPosition | Exempt, now: float, slack_s: float = 0.0
) -> float | None:
    """How much longer `other` may hold up the stalled rank; None if it cannot be the reason.

    `other` may be the reason if it stopped earlier and is within its limit; if it is in a long
    phase, for which others wait; if it works in the same step or an earlier one, as a rank does
    that evaluates without a section; or if it is in no collective while the stalled rank is in one,
    or has not come as far as the next one and works. It is never the reason if it waits in a
    collective that the stalled rank, which is in none, has not entered, though it is one of that
    group's ranks: then it waits for the stalled rank. `slack_s` is the precision of a comparison
    between two nodes.
    """
    if isinstance(other, Exempt):
        return _PAUSE_S if other.until_s is None else max(0.0, other.until_s - now)
    left_s = other.limit.s - other.waited_s(now)
    if left_s <= 0 or other.rank == stalled.rank:
        return None
    if _waits_for(other, stalled):
        return None
    stopped_before = other.stopped_s <= stalled.stopped_s + slack_s
    is_behind = (other.step or 0) <= (stalled.step or 0)
    works_on = now - other.stopped_s < stalled.waited_s(now) / 2
    is_missing = bool(stalled.waits_in) and other.waits_in == ""
    works_on |= other.is_under_way and bool(stalled.entered_in)
    if stopped_before or is_missing or (is_behind and (works_on or other.phase in LONG)):
        return left_s
    return None


def _waits_for(place: RankPosition, late: RankPosition) -> bool:
    if place.awaits is None:
        return False
    group, number = place.awaits
    return late.entered_in.get(group, number) < number


def _precedence(place: RankPosition) -> tuple[bool, bool, int, float]:
    """The order in which ranks that are late together are reported: the first one is named.

    Those in a collective wait for those that are in none, a compilation that has hung makes others
    wait, and so does a rank whose last step is older than that of others.
    """
    return bool(place.waits_in), not place.idle_s, place.step or 0, place.since_s


_LATE_S = 1.0
"""A look that comes this much later than planned: this process was stopped, or had no turn."""
_LOOK_AT_LEAST_S = 5.0
_AHEAD_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Stalled:
    """A rank has made no progress past its limit."""

    place: RankPosition
    waited_s: float


@dataclass(frozen=True, slots=True)
class Moving:
    """A rank that had stalled has made progress."""

    stalled: Stalled
    stalled_s: float
    step: int | None
    section: str | None


@dataclass(frozen=True, slots=True)
class Excused:
    """A rank is past its limit, but may be waiting for another rank that is not."""

    place: RankPosition
    by: int
    for_s: float


@dataclass
class StallJudge:
    """The ranks of one round on this node."""

    limits: StallLimits
    began_s: float
    ahead_s: float = 0.0
    """Call `look` also this long before a rank is late; a third of short limits."""
    is_stopped: Callable[[RankPosition], bool] = lambda _: False
    """Whether a signal or a debugger holds a rank: then no other rank excuses it."""
    stalled: dict[int, Stalled] = field(default_factory=dict)
    places: dict[int, RankPosition | Exempt] = field(default_factory=dict)
    """The position of each rank at the last look."""
    wake_at: float = 0.0
    """When `look` must be called next."""
    _excused: set[int] = field(default_factory=set)
    _blind: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def look(self, views: Iterable[RankView], now: float) -> list[Stalled | Moving | Excused]:
        """Return new stalls and recoveries."""
        if self.wake_at and now - self.wake_at > _LATE_S:
            self._blind.append((self.wake_at, now))
        placed = {
            view.rank: position_of(view, self.limits, now) for view in views if not view.trouble
        }
        self.places = {rank: place for rank, place in placed.items() if place is not None}
        news: list[Stalled | Moving | Excused] = [*self._moving(placed.keys(), now)]
        late = [place for place in self._judged() if self._left_s(place, now) <= 0]
        for place in sorted(late, key=_precedence):
            news += self._late(place, now)
        self.wake_at = now + self._wait_s(now)
        return news

    def excuse(
        self, stalled: RankPosition, now: float, slack_s: float = 0.0
    ) -> tuple[int, float] | None:
        """The rank of ours for which another may be waiting, and how much longer it may take."""
        excuses = {
            rank: excuse_s(stalled, other, now, slack_s) for rank, other in self.places.items()
        }
        possible = [(for_s, rank) for rank, for_s in excuses.items() if for_s is not None]
        if not possible:
            return None
        for_s, rank = max(possible)
        return rank, for_s

    def witnessed_s(self, place: RankPosition, now: float) -> float:
        """How long it has made no progress, without the time in which we could not look."""
        blind = (
            min(now, end) - max(place.since_s, begin)
            for begin, end in self._blind
            if end > place.since_s
        )
        return place.waited_s(now, sum(blind))

    def nearly_late(self, now: float) -> list[RankPosition]:
        """The positions of ranks that will have stalled in `ahead_s` if they do not move."""
        return [
            place
            for place in self._judged()
            if place.rank not in self.stalled
            and 0 < self._left_s(place, now) <= self._ahead_s(place)
        ]

    def in_question(self, now: float) -> set[int]:
        """Ranks that are late, or nearly, and have not been reported."""
        return {
            place.rank
            for place in self._judged()
            if place.rank not in self.stalled and self._left_s(place, now) <= self._ahead_s(place)
        }

    def _ahead_s(self, place: RankPosition) -> float:
        return min(self.ahead_s, place.limit.s / _AHEAD_RATIO)

    def _judged(self) -> list[RankPosition]:
        return [place for place in self.places.values() if isinstance(place, RankPosition)]

    def _left_s(self, place: RankPosition, now: float) -> float:
        return place.limit.s - self.witnessed_s(place, now)

    def _late(self, place: RankPosition, now: float) -> list[Stalled | Moving | Excused]:
        if place.rank in self.stalled:
            return []
        excuse = self.excuse(place, now)
        if excuse is not None and not self.is_stopped(place):
            is_news = place.rank not in self._excused
            self._excused.add(place.rank)
            return [Excused(place, *excuse)] if is_news else []
        stalled = Stalled(place, self.witnessed_s(place, now))
        self.stalled[place.rank] = stalled
        return [stalled]

    def _moving(self, seen: Collection[int], now: float) -> list[Moving]:
        """Only ranks that were looked at: nothing is known about others."""
        moving: list[Moving] = []
        for rank in sorted(self.stalled.keys() & seen):
            stalled = self.stalled[rank]
            place = self.places.get(rank)
            since_s = place.since_s if isinstance(place, RankPosition) else now
            if since_s > stalled.place.since_s:
                del self.stalled[rank]
                section = place.section if isinstance(place, RankPosition) else None
                step = place.step if place else None
                lasted_s = since_s - stalled.place.since_s
                moving.append(Moving(stalled, lasted_s, step, section))
        self._excused &= {place.rank for place in self._judged() if self._left_s(place, now) <= 0}
        return moving

    def _wait_s(self, now: float) -> float:
        """Until the next rank may be late, whatever it does meanwhile."""
        waits = [min(_LOOK_AT_LEAST_S, self.limits.shortest_s())]
        for place in self._judged():
            left_s = self._left_s(place, now)
            if left_s > 0:
                waits.append(left_s)
            if left_s > (ahead_s := self._ahead_s(place)):
                waits.append(left_s - ahead_s)
        return max(min(waits), 0.001)


def states(judge: StallJudge | None) -> Mapping[int, str]:
    """The ranks that are paused or stalled, for beats; the others run."""
    if judge is None:
        return {}
    paused = {rank: "paused" for rank, place in judge.places.items() if isinstance(place, Exempt)}
    return {**paused, **dict.fromkeys(judge.stalled, "stalled")}
