"""Judges the ranks of one round: who has stalled, who moves again, and when to look next.

Pure: `look` takes what the pages say and `now`, and says what is new. A judge lives for one
round: nothing that it knows reaches the next.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from everstep_services.agent.stalls.excuses import excuse_s
from everstep_services.agent.stalls.limits import Limits
from everstep_services.agent.stalls.position import Aside, Place, View, place_of

_LATE_S = 1.0
"""Whoever is called so much later than asked for was stopped, or had no turn."""
_LOOK_AT_LEAST_S = 5.0
_AHEAD_RATIO = 3.0


@dataclass(frozen=True, slots=True)
class Stalled:
    """A rank has made no progress past its limit."""

    place: Place
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
    """A rank is past its limit, but may well wait for one that is not."""

    place: Place
    by: int
    for_s: float


@dataclass
class Judge:
    """The ranks of one round on this node."""

    limits: Limits
    began_s: float
    ahead_s: float = 0.0
    """`look` is to be called so long before a rank is late, too; of short limits a third."""
    stalled: dict[int, Stalled] = field(default_factory=dict)
    places: dict[int, Place | Aside] = field(default_factory=dict)
    """Where each rank was when it was looked at last."""
    wake_at: float = 0.0
    """When `look` wants to be called next."""
    _excused: set[int] = field(default_factory=set)
    _blind: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=256))

    def look(self, views: Iterable[View], now: float) -> list[Stalled | Moving | Excused]:
        """What is new."""
        if self.wake_at and now - self.wake_at > _LATE_S:
            self._blind.append((self.wake_at, now))
        placed = {view.rank: place_of(view, self.limits, now) for view in views if not view.trouble}
        self.places = {rank: place for rank, place in placed.items() if place is not None}
        news: list[Stalled | Moving | Excused] = [*self._moving(placed.keys(), now)]
        late = [place for place in self._judged() if self._left_s(place, now) <= 0]
        # Of ranks that are late at once, those in a collective wait for those that are in none;
        # a compilation that has hung made others wait.
        order = sorted(late, key=lambda one: (bool(one.waits_in), not one.idle_s, one.since_s))
        for place in order:
            news += self._late(place, now)
        self.wake_at = now + self._wait_s(now)
        return news

    def excuse(self, stalled: Place, now: float, slack_s: float = 0.0) -> tuple[int, float] | None:
        """Which rank of ours another one may wait for, and how long it may go on."""
        excuses = {
            rank: excuse_s(stalled, other, now, slack_s) for rank, other in self.places.items()
        }
        known = [(for_s, rank) for rank, for_s in excuses.items() if for_s is not None]
        if not known:
            return None
        for_s, rank = max(known)
        return rank, for_s

    def witnessed_s(self, place: Place, now: float) -> float:
        """How long it has made no progress, without the time in which we could not look."""
        blind = (
            min(now, end) - max(place.since_s, begin)
            for begin, end in self._blind
            if end > place.since_s
        )
        return place.waited_s(now, sum(blind))

    def nearly_late(self, now: float) -> list[Place]:
        """Where ranks are that have stalled if they do not move within `ahead_s`."""
        return [
            place
            for place in self._judged()
            if place.rank not in self.stalled
            and 0 < self._left_s(place, now) <= self._ahead_s(place)
        ]

    def in_question(self, now: float) -> set[int]:
        """Ranks that are late, or nearly, and of which nothing was said yet."""
        return {
            place.rank
            for place in self._judged()
            if place.rank not in self.stalled and self._left_s(place, now) <= self._ahead_s(place)
        }

    def _ahead_s(self, place: Place) -> float:
        return min(self.ahead_s, place.limit.s / _AHEAD_RATIO)

    def _judged(self) -> list[Place]:
        return [place for place in self.places.values() if isinstance(place, Place)]

    def _left_s(self, place: Place, now: float) -> float:
        return place.limit.s - self.witnessed_s(place, now)

    def _late(self, place: Place, now: float) -> list[Stalled | Moving | Excused]:
        if place.rank in self.stalled:
            return []
        excuse = self.excuse(place, now)
        if excuse is not None:
            is_news = place.rank not in self._excused
            self._excused.add(place.rank)
            return [Excused(place, *excuse)] if is_news else []
        stalled = Stalled(place, self.witnessed_s(place, now))
        self.stalled[place.rank] = stalled
        return [stalled]

    def _moving(self, seen: Collection[int], now: float) -> list[Moving]:
        """Of those that were looked at: nobody knows of others whether they move."""
        moving: list[Moving] = []
        for rank in sorted(self.stalled.keys() & seen):
            stalled = self.stalled[rank]
            place = self.places.get(rank)
            since_s = place.since_s if isinstance(place, Place) else now
            if since_s > stalled.place.since_s:
                del self.stalled[rank]
                section = place.section if isinstance(place, Place) else None
                step = place.step if place else None
                lasted_s = since_s - stalled.place.since_s
                moving.append(Moving(stalled, lasted_s, step, section))
        self._excused &= {place.rank for place in self._judged() if self._left_s(place, now) <= 0}
        return moving

    def _wait_s(self, now: float) -> float:
        """Until the next rank may be late, wherever it goes meanwhile."""
        waits = [min(_LOOK_AT_LEAST_S, self.limits.shortest_s())]
        for place in self._judged():
            left_s = self._left_s(place, now)
            if left_s > 0:
                waits.append(left_s)
            if left_s > (ahead_s := self._ahead_s(place)):
                waits.append(left_s - ahead_s)
        return max(min(waits), 0.001)


def states(judge: Judge | None) -> Mapping[int, str]:
    """For beats: which ranks are paused or stalled; the others run."""
    if judge is None:
        return {}
    paused = {rank: "paused" for rank, one in judge.places.items() if isinstance(one, Aside)}
    return {**paused, **dict.fromkeys(judge.stalled, "stalled")}
