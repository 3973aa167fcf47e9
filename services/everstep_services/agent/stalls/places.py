"""Where a rank is, for how long it has been there, and how long it may be."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from everstep_services.agent.stalls.limits import Limit, Limits
from trainer_sdk.page import CountedBy, Kind, LaneReading, PageReading, Phase, SectionReading

_PAUSE_S = 60.0
"""Somebody else may ask again after this, when a pause has no end."""
_IDLE_S = 1.0
"""Who has done nothing for so long is idle."""
_WAITS_S = 3.0
"""Who has done nothing for so long, and is in a collective, waits in that."""
_LATELY_S = 10.0
"""What was seen of a rank holds so long, if it has not moved."""
_NEARLY_S = 1.0
"""What it has not entered so long before it is late, it has not entered in time."""
_COMPILE = "compile"
_LONG = frozenset({"checkpoint", "evaluation", _COMPILE})


@dataclass(frozen=True, slots=True)
class Signs:
    """What else shows whether a rank works, where its page cannot."""

    idle_s: float | None = None
    """How long its process has used no processor and moved no bytes; None if nobody looked."""
    collective_s: float | None = None
    """When it was last seen to enter another collective."""
    waits_in: str = ""
    """The collective that it is in, if it is in one."""
    is_recorded: bool = False
    """Its collectives can be read: where `waits_in` is empty, it is in none."""
    of_all: int | None = None
    """The last that it has entered of the group in which all ranks are; None if nobody knows."""
    awaits: int | None = None
    """The oldest of these that it is in, where it is in no others."""

    @property
    def collective(self) -> str | None:
        """The collective that it is in; empty for none, None if nobody knows."""
        return self.waits_in if self.waits_in or self.is_recorded else None


@dataclass(frozen=True, slots=True)
class View:
    """All that is known of one rank at one moment."""

    rank: int
    born_s: float
    """When its process was started."""
    page: PageReading | None = None
    lanes: tuple[LaneReading, ...] = ()
    section: Callable[[int], SectionReading] | None = None
    """What its page says of a section."""
    threads: Collection[int] | None = None
    """Its threads, if somebody looked: sections of others will never end, and mean nothing."""
    signs: Signs = Signs()
    looked_s: float = 0.0
    """When these were seen."""
    compile_idle_s: float = 0.0
    """For how long what it compiles has computed next to nothing."""
    trouble: str = ""
    """Why its page cannot be trusted."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is without having made progress since."""

    rank: int
    phase: str
    """As in `rank_stalled`."""
    since_s: float
    limit: Limit
    section: str | None = None
    step: int | None = None
    signal: str = "page"
    pid: int | None = None
    waits_in: str | None = None
    """The collective that it is in; empty for none, None if nobody knows."""
    entered: int | None = None
    """It is late, and in no collective: the last that it has entered of the group in which all
    ranks are; None if nobody knows."""
    awaits: int | None = None
    """The one of that group that it does nothing but wait in, if it is known to."""
    is_under_way: bool = False
    """It is known to be in no collective, and to work."""
    ordinary: Limit | None = None
    """Where torch compiles: the limit that would hold if it did not."""
    idle_s: float = 0.0
    """Why that holds: for so long the compilation has computed next to nothing."""

    def waited_s(self, now: float, blind_s: float = 0.0) -> float:
        """How long it has made no progress, as far as that was witnessed."""
        return max(0.0, now - self.since_s - blind_s)


@dataclass(frozen=True, slots=True)
class Aside:
    """A rank that is not to be judged, because it said so."""

    rank: int
    until_s: float | None
    step: int | None = None


def place_of(view: View, limits: Limits, now: float) -> Place | Aside | None:
    """Where the rank is; None for one whose script is over."""
    page = view.page
    if page is None:
        return Place(view.rank, "start", view.born_s, _patience(limits.first_step(), view, limits))
    if page.phase is Phase.ENDED:
        return None
    step = page.step or None
    if page.pauses > 0 and not 0 < page.paused_until_s <= now:
        return Aside(view.rank, page.paused_until_s or None, step)
    resumed_s = max(
        page.paused_until_s if page.pauses > 0 else 0.0, page.compiling_s, page.compiled_s
    )
    places = _places(view, page, limits, resumed_s)
    place = min(places, key=lambda place: place.since_s + place.limit.s)
    return _seen(_compiling(place, view, limits, now) if page.compiling_s else place, view, now)


def _seen(place: Place, view: View, now: float) -> Place:
    """With what was seen of its collectives, if that was lately and since it stopped."""
    signs = view.signs
    is_lately = place.since_s < view.looked_s and now - view.looked_s <= _LATELY_S
    if not is_lately or not signs.is_recorded or signs.idle_s is None:
        return place
    if signs.waits_in:
        return replace(place, awaits=signs.awaits if signs.idle_s >= _WAITS_S else None)
    is_late = view.looked_s >= place.since_s + place.limit.s - _NEARLY_S
    entered = signs.of_all if is_late else None
    return replace(place, entered=entered, is_under_way=signs.idle_s < _IDLE_S)


def _places(view: View, page: PageReading, limits: Limits, resumed_s: float) -> list[Place]:
    """Where each of its threads is."""
    if not page.steps:
        return [_before_first_step(view, page, limits, resumed_s)]
    places = [_in_lane(view, page, lane, limits, resumed_s) for lane in _live(view)]
    if page.counted_by is CountedBy.SDK and not _is_in_long_phase(view):
        places.append(_between_steps(view, page, limits, resumed_s))
    elif not places:
        places.append(_unmodified(view, page, limits, resumed_s))
    return places


def _compiling(place: Place, view: View, limits: Limits, now: float) -> Place:
    """It may take as long as a first step, in which torch compiles, too.

    No limit that was learned where it does not compile says anything, also of other threads of
    the rank: they may wait for the one that does. But one that computes nothing has hung.
    """
    section, ordinary = _innermost(view), place.limit
    idle_s = min(view.compile_idle_s, place.waited_s(now))
    place = replace(
        place, phase=_COMPILE, ordinary=ordinary, section=section.name if section else None
    )
    if idle_s >= limits.idle_compile_s(ordinary):
        return replace(place, idle_s=idle_s)
    longest = max(limits.first_step(), ordinary, key=lambda limit: limit.s)
    return replace(place, limit=longest)


def excuse_s(
    stalled: Place, other: Place | Aside, now: float, slack_s: float = 0.0
) -> float | None:
    """How long `other` may be what the stalled rank waits for; None if it is not.

    Who stopped before, and may be where it is. Who is in a long phase, for which others wait. Who
    works on in the same step or an earlier one, as a rank does that evaluates without saying so.
    Or who is in no collective, where the stalled rank is in one, or where it has not come as far
    as the next and works. Never who waits in a collective of all that the stalled rank, which is
    in none, has not entered: it waits for that. `slack_s`: how well instants of two nodes can be
    compared.
    """
    if isinstance(other, Aside):
        return _PAUSE_S if other.until_s is None else max(0.0, other.until_s - now)
    left_s = other.limit.s - other.waited_s(now)
    if left_s <= 0 or other.rank == stalled.rank:
        return None
    if _waits_for(other, stalled):
        return None
    stopped_before = other.since_s <= stalled.since_s + slack_s
    is_behind = (other.step or 0) <= (stalled.step or 0)
    works_on = other.waited_s(now) < stalled.waited_s(now) / 2
    is_missing = bool(stalled.waits_in) and other.waits_in == ""
    works_on |= other.is_under_way and stalled.entered is not None
    if stopped_before or is_missing or (is_behind and (works_on or other.phase in _LONG)):
        return left_s
    return None


def _waits_for(one: Place, late: Place) -> bool:
    return one.awaits is not None and late.entered is not None and late.entered < one.awaits


def _live(view: View) -> list[LaneReading]:
    """The main thread's lane, and those of other threads that are in a section."""
    return [
        lane
        for number, lane in enumerate(view.lanes)
        if not number or (lane.frames and (view.threads is None or lane.thread in view.threads))
    ]


def _before_first_step(view: View, page: PageReading, limits: Limits, resumed_s: float) -> Place:
    signs = view.signs
    moved = [page.progress_s, page.script_s, resumed_s, signs.collective_s or 0.0]
    since_s = max([*moved, *(lane.moved_s for lane in view.lanes)])
    phase = "first_step" if page.phase is Phase.SCRIPT else "start"
    section = _innermost(view)
    return Place(
        view.rank,
        phase,
        since_s,
        _patience(limits.first_step(), view, limits),
        section=section.name if section else None,
        signal=_signal(since_s, signs),
        pid=page.pid,
        waits_in=signs.collective,
    )


def _in_lane(
    view: View, page: PageReading, lane: LaneReading, limits: Limits, resumed_s: float
) -> Place:
    assert view.section is not None
    section = view.section(lane.frames[-1].section if lane.frames else 0)
    moved = [lane.moved_s, resumed_s]
    if lane is view.lanes[0]:
        moved.append(page.progress_s)
    phase = "step" if not section.name else section.kind.value
    return Place(
        view.rank,
        "section" if phase == "plain" else phase,
        max(moved),
        limits.section(section.name, section.kind),
        section=section.name or None,
        step=page.step,
        pid=page.pid,
    )


def _between_steps(view: View, page: PageReading, limits: Limits, resumed_s: float) -> Place:
    since_s = max(page.progress_s, resumed_s)
    section = _innermost(view)
    name = section.name if section else None
    return Place(
        view.rank, "step", since_s, limits.step(), section=name, step=page.step, pid=page.pid
    )


def _unmodified(view: View, page: PageReading, limits: Limits, resumed_s: float) -> Place:
    """A script that says nothing of itself: steps of its optimizer, and collectives."""
    signs = view.signs
    since_s = max(page.progress_s, resumed_s, signs.collective_s or 0.0)
    outside = limits.section("", Kind.PLAIN)
    works = not signs.waits_in and (signs.idle_s is None or signs.idle_s < _IDLE_S)
    limit = limits.step() if works and outside.source != "configured" else outside
    return Place(
        view.rank,
        "step",
        since_s,
        limit,
        step=page.step,
        signal=_signal(since_s, signs),
        pid=page.pid,
        waits_in=signs.collective,
    )


def _signal(since_s: float, signs: Signs) -> str:
    """What has shown its last progress."""
    return (
        "collectives"
        if signs.collective_s is not None and signs.collective_s == since_s
        else "page"
    )


def _patience(limit: Limit, view: View, limits: Limits) -> Limit:
    """A rank that works, and does not wait for others, may be on its way to its first step."""
    signs = view.signs
    if signs.idle_s is None or signs.idle_s >= _IDLE_S or signs.waits_in:
        return limit
    if limit.source == "configured":
        return limit
    return Limit(limit.s * limits.rules.busy_factor, limit.source)


def _is_in_long_phase(view: View) -> bool:
    section = view.section
    if section is None:
        return False
    return any(
        section(frame.section).kind is not Kind.PLAIN
        for lane in view.lanes
        for frame in lane.frames
    )


def _innermost(view: View) -> SectionReading | None:
    if not view.lanes or not view.lanes[0].frames or view.section is None:
        return None
    return view.section(view.lanes[0].frames[-1].section)
