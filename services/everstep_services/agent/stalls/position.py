"""The position of a rank: where it makes no progress, since when, and how long it may."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from everstep_services.agent.stalls.limits import (
    FIRST_STEP,
    HEARTBEAT,
    OUTSIDE,
    STEP,
    Limit,
    StallLimits,
    is_by_hand,
)
from everstep_services.agent.stalls.rank_view import ActivitySigns, RankView
from trainer_sdk.page_content import (
    CountedBy,
    LaneReading,
    PageReading,
    RankPhase,
    SectionKind,
    SectionReading,
)

_BUSY_FACTOR = 4.0
"""The factor for a rank that shows nothing but its processor time."""
_IDLE_S = 1.0
"""A process that has done nothing for this long is idle."""
_WAITS_S = 3.0
"""A process that has done nothing for this long, while in a collective, waits in it."""
_LATELY_S = 10.0
"""A look at a rank counts for this long, if the rank has not moved."""
_NEARLY_S = 1.0
"""A collective not entered this long before the rank is late was not entered in time."""
_COMPILE: Final = "compile"
StallPhase = Literal[
    "start", "first_step", "step", "section", "checkpoint", "evaluation", "compile", "heartbeat"
]
"""Where a rank makes no progress, as in `rank_stalled.phase`."""
LONG: frozenset[StallPhase] = frozenset({"checkpoint", "evaluation", _COMPILE})
"""Phases for which other ranks wait."""


@dataclass(frozen=True, slots=True)
class RankPosition:
    """Where a rank has made no progress, and the limit that counts there."""

    rank: int
    phase: StallPhase
    since_s: float
    """The start of the time that the limit counts."""
    limit: Limit
    section: str | None = None
    step: int | None = None
    signal: str = "page"
    pid: int | None = None
    waits_in: str | None = None
    """The collective that it is in; empty for none, None if that is not known."""
    entered_in: Mapping[str, int] = field(default_factory=dict)
    """For a late rank in no collective: the last collective that it has entered, by its number in
    each process group; empty if that is not known.
    """
    awaits: tuple[str, int] | None = None
    """The collective in which it only waits, if that is known: its group, and its number there."""
    is_main: bool = True
    """The limit is that of the main thread, which calls collectives, or of the whole rank."""
    is_under_way: bool = False
    """It is known to be in no collective, and to work."""
    ordinary: Limit | None = None
    """While torch compiles: the limit that would count otherwise."""
    idle_s: float = 0.0
    """Why that limit counts: the compilation has computed next to nothing for this long."""
    moved_s: float | None = None
    """When it last made progress, if the limit counts from an earlier instant."""

    @property
    def stopped_s(self) -> float:
        """Since when it makes no progress: others may be waiting for it from then on."""
        return self.since_s if self.moved_s is None else self.moved_s

    def waited_s(self, now: float, blind_s: float = 0.0) -> float:
        """How long it has made no progress, as far as that was witnessed."""
        return max(0.0, now - self.since_s - blind_s)


@dataclass(frozen=True, slots=True)
class Exempt:
    """A rank that is not judged, because its script has paused that."""

    rank: int
    until_s: float | None
    step: int | None = None


def position_of(view: RankView, limits: StallLimits, now: float) -> RankPosition | Exempt | None:
    """The position of a rank; None if its script is over."""
    page = view.page
    if page is None:
        return RankPosition(view.rank, "start", view.born_s, _patience(limits.first_step(), view))
    if page.phase is RankPhase.ENDED:
        return None
    step = page.step or None
    if page.pauses > 0 and not 0 < page.paused_until_s <= now:
        return Exempt(view.rank, page.paused_until_s or None, step)
    resumed_s = max(
        page.paused_until_s if page.pauses > 0 else 0.0, page.compiling_s, page.compiled_s
    )
    places = _places(view, page, limits, resumed_s)
    if page.compiling_s:
        places = [_compiling(place, view, limits, now) for place in places]
    return _seen(min(places, key=_deadline), view, now)


def _deadline(place: RankPosition) -> tuple[float, float]:
    """When it is late; of equals, first the one that would be late first without compilation."""
    ordinary_s = place.limit.s if place.ordinary is None else place.ordinary.s
    return place.since_s + place.limit.s, place.since_s + ordinary_s


def _seen(place: RankPosition, view: RankView, now: float) -> RankPosition:
    """Add what a recent look has shown about its collectives since it stopped."""
    signs = view.signs
    is_lately = place.stopped_s < view.looked_s and now - view.looked_s <= _LATELY_S
    if not is_lately or not signs.is_recorded or signs.idle_s is None:
        return place
    if place.is_main:
        place = replace(place, waits_in=signs.collective)
    if signs.waits_in:
        return replace(place, awaits=signs.awaits if signs.idle_s >= _WAITS_S else None)
    is_late = view.looked_s >= place.since_s + place.limit.s - _NEARLY_S
    entered_in = signs.entered_in if is_late else {}
    return replace(place, entered_in=entered_in, is_under_way=signs.idle_s < _IDLE_S)


def _places(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> list[RankPosition]:
    """All positions of the rank: by limits that people have set, and by the usual ones.

    Where people let it stay for long, it may also be on its way to its next step for that long.
    """
    stays = [*_stays_by_hand(view, page, limits, resumed_s)]
    spans = [*_spans_by_hand(view, page, limits, resumed_s)]
    stays_until = max((_deadline(place) for place in stays), default=(0.0, 0.0))
    for place in _in_phase(view, page, limits, resumed_s):
        is_met = {place.limit.name} & {span.limit.name for span in spans}
        if not is_met and (is_by_hand(place.limit) or _deadline(place) >= stays_until):
            spans.append(place)
    return [*stays, *spans, *_in_lanes(view, page, limits, resumed_s)]


def _in_phase(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> list[RankPosition]:
    """On its way to its first step, from heartbeat to heartbeat, or from step to step."""
    if is_warming_up(page, limits):
        if page.beats and not page.steps:
            return [_between_beats(view, page, limits, resumed_s)]
        return [_before_first_step(view, page, limits, resumed_s)]
    if page.counted_by is CountedBy.SDK:
        is_long = _is_in_long_phase(view)
        return [] if is_long else [_between_steps(view, page, resumed_s, limits.usual_step())]
    is_by_hand_alone = limits.by_hand(OUTSIDE) is not None or limits.by_hand(STEP) is not None
    if _live(view) or is_by_hand_alone:
        return []
    return [_unmodified(view, page, limits, resumed_s)]


def _in_lanes(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> list[RankPosition]:
    """In the innermost section of each thread, or outside all sections."""
    if is_warming_up(page, limits):
        return []
    return [
        place
        for lane in _live(view)
        if (place := _in_lane(view, page, lane, limits, resumed_s)) is not None
    ]


def is_warming_up(page: PageReading, limits: StallLimits) -> bool:
    """It makes its first steps, which may take long."""
    return page.steps < (limits.rules.warmup_steps or page.warmup or 1)


def _compiling(
    place: RankPosition, view: RankView, limits: StallLimits, now: float
) -> RankPosition:
    """Let a compilation take as long as a first step, in which torch compiles, too.

    A limit that was learned without compilation does not apply, also to other threads of the
    rank: they may wait for the one that compiles. But a compilation that computes nothing has
    hung.
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


def _live(view: RankView) -> list[LaneReading]:
    """The main thread's lane, and those of other threads that are in a section."""
    return [
        lane
        for number, lane in enumerate(view.lanes)
        if not number or (lane.frames and (view.threads is None or lane.thread in view.threads))
    ]


def _before_first_step(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> RankPosition:
    """Sections that come and go, and collectives, are progress."""
    since_s = _moved_s(view, page, resumed_s)
    section = _innermost(view)
    return RankPosition(
        view.rank,
        _early(page),
        since_s,
        _patience(limits.first_step(), view),
        section=section.name if section else None,
        signal=_signal(since_s, view.signs),
        pid=page.pid,
        waits_in=view.signs.collective,
    )


def _between_beats(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> RankPosition:
    """A rank that only sends heartbeats, or has not made its first step yet."""
    place = _before_first_step(view, page, limits, resumed_s)
    limit = _patience(limits.usual_heartbeat(), view)
    return replace(place, phase=HEARTBEAT, limit=limit)


def _in_lane(
    view: RankView, page: PageReading, lane: LaneReading, limits: StallLimits, resumed_s: float
) -> RankPosition | None:
    """None where a limit is set by hand: `_stays_by_hand` returns that."""
    assert view.section is not None
    section = view.section(lane.frames[-1].section if lane.frames else 0)
    if limits.by_hand(section.name or OUTSIDE) is not None:
        return None
    return RankPosition(
        view.rank,
        _phase(section),
        _lane_moved_s(view, page, lane, resumed_s),
        limits.usual_section(section.name, section.kind),
        section=section.name or None,
        step=page.step,
        pid=page.pid,
        is_main=lane is view.lanes[0],
    )


def _between_steps(
    view: RankView, page: PageReading, resumed_s: float, limit: Limit
) -> RankPosition:
    section = _innermost(view)
    return RankPosition(
        view.rank,
        "step",
        max(page.progress_s, resumed_s),
        limit,
        section=section.name if section else None,
        step=page.step,
        pid=page.pid,
    )


def _unmodified(
    view: RankView,
    page: PageReading,
    limits: StallLimits,
    resumed_s: float,
    limit: Limit | None = None,
) -> RankPosition:
    """A script without the SDK: steps of its optimizer, and collectives."""
    signs = view.signs
    since_s = max(page.progress_s, resumed_s, signs.collective_s or 0.0)
    works = not signs.waits_in and (signs.idle_s is None or signs.idle_s < _IDLE_S)
    usual = limits.usual_step() if works else limits.usual_section("", SectionKind.PLAIN)
    return RankPosition(
        view.rank,
        "step",
        since_s,
        limit or usual,
        step=page.step,
        signal=_signal(since_s, signs),
        pid=page.pid,
        waits_in=signs.collective,
    )


def _stays_by_hand(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> Iterator[RankPosition]:
    """Each open section, however deep, and the time outside all sections.

    A section's limit counts from its entry: sections inside do not restart it, but a heartbeat
    of the same thread does.
    """
    for lane in _live(view):
        for frame in lane.frames:
            assert view.section is not None
            section = view.section(frame.section)
            limit = _section_by_hand(section.name, page, limits)
            if limit is not None:
                innermost = view.section(lane.frames[-1].section)
                yield RankPosition(
                    view.rank,
                    _phase(innermost if innermost.kind is not SectionKind.PLAIN else section),
                    max(frame.since_s, lane.beat_s, resumed_s),
                    limit,
                    section=section.name,
                    step=page.step or None,
                    pid=page.pid,
                    moved_s=_lane_moved_s(view, page, lane, resumed_s),
                    is_main=lane is view.lanes[0],
                )
    limit = limits.by_hand(OUTSIDE)
    is_open = page.steps > 0 or (
        page.phase is RankPhase.SCRIPT and not limits.rules.is_outside_late
    )
    if limit is not None and is_open and not (view.lanes and view.lanes[0].frames):
        yield _outside_by_hand(view, page, limits, resumed_s, limit)


def _outside_by_hand(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float, limit: Limit
) -> RankPosition:
    """From the first line of the script on."""
    if not page.steps:
        return replace(_before_first_step(view, page, limits, resumed_s), limit=limit)
    if not view.lanes:
        return _unmodified(view, page, limits, resumed_s, limit)
    since_s = _lane_moved_s(view, page, view.lanes[0], resumed_s)
    return RankPosition(view.rank, "step", since_s, limit, step=page.step, pid=page.pid)


def _section_by_hand(name: str, page: PageReading, limits: StallLimits) -> Limit | None:
    """A step that may take long has the limit of a first step, if a person has set one."""
    if name != STEP or not is_warming_up(page, limits):
        return limits.by_hand(name)
    first_step = limits.by_hand(FIRST_STEP)
    if first_step is None and (limits.rules.warmup_steps or page.warmup):
        return None
    return first_step or limits.by_hand(STEP)


def _spans_by_hand(
    view: RankView, page: PageReading, limits: StallLimits, resumed_s: float
) -> Iterator[RankPosition]:
    """From step to step, and from heartbeat to heartbeat, whatever sections come and go."""
    if page.is_closed or _is_in_long_phase(view):
        return
    step, heartbeat = limits.by_hand(STEP), limits.by_hand(HEARTBEAT)
    if step is not None and not is_warming_up(page, limits):
        if page.counted_by is CountedBy.SDK:
            yield _between_steps(view, page, resumed_s, step)
        else:
            yield _unmodified(view, page, limits, resumed_s, step)
    if heartbeat is not None and page.beats:
        place = _between_steps(view, page, resumed_s, heartbeat)
        yield replace(place, phase=HEARTBEAT, step=page.step or None)


def _phase(section: SectionReading) -> StallPhase:
    if not section.name:
        return "step"
    match section.kind:
        case SectionKind.PLAIN:
            return "section"
        case SectionKind.CHECKPOINT:
            return "checkpoint"
        case SectionKind.EVALUATION:
            return "evaluation"


def _early(page: PageReading) -> StallPhase:
    return "first_step" if page.phase is RankPhase.SCRIPT else "start"


def _moved_s(view: RankView, page: PageReading, resumed_s: float) -> float:
    """When it last showed any activity on its way to its first step."""
    signs = view.signs
    moved = [page.progress_s, page.script_s, resumed_s, signs.collective_s or 0.0]
    return max([*moved, *(lane.moved_s for lane in view.lanes)])


def _lane_moved_s(view: RankView, page: PageReading, lane: LaneReading, resumed_s: float) -> float:
    is_main = lane is view.lanes[0]
    return max(lane.moved_s, resumed_s, page.progress_s if is_main else 0.0)


def _signal(since_s: float, signs: ActivitySigns) -> str:
    """The kind of sign that has shown its last progress."""
    return (
        "collectives"
        if signs.collective_s is not None and signs.collective_s == since_s
        else "page"
    )


def _patience(limit: Limit, view: RankView) -> Limit:
    """A rank that works, and does not wait for others, may be on its way to its first step."""
    signs = view.signs
    if signs.idle_s is None or signs.idle_s >= _IDLE_S or signs.waits_in or is_by_hand(limit):
        return limit
    return replace(limit, s=limit.s * _BUSY_FACTOR)


def _is_in_long_phase(view: RankView) -> bool:
    section = view.section
    if section is None:
        return False
    return any(
        section(frame.section).kind is not SectionKind.PLAIN
        for lane in view.lanes
        for frame in lane.frames
    )


def _innermost(view: RankView) -> SectionReading | None:
    if not view.lanes or not view.lanes[0].frames or view.section is None:
        return None
    return view.section(view.lanes[0].frames[-1].section)
