"""How long sections of ranks take, and which limits can act on the ranks."""

from collections.abc import Collection, Iterator

from everstep.messages import SectionLimit, SectionSeen
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.stalls.limits import (
    FIRST_STEP,
    HEARTBEAT,
    OUTSIDE,
    STEP,
    Limit,
    StallLimits,
)
from everstep_services.agent.stalls.position import is_warming_up
from trainer_sdk.page import BadPageError
from trainer_sdk.page_content import CountedBy, PageReading, SectionKind, SectionReading

_REGULAR_S = 1800.0
"""A script that has sent heartbeats for this long without a step does more than load."""


def seen_by(watched: WatchedRank, limits: StallLimits) -> Iterator[SectionSeen]:
    """The longest time of each section on one rank, since its first steps."""
    page = watched.reading()
    if page is None:
        return
    if _beats_regularly(page):
        yield _seen(HEARTBEAT, HEARTBEAT, page.longest_beat_s, page.beats - 1)
    if is_warming_up(page, limits):
        return
    observations = page.steps - (limits.rules.warmup_steps or page.warmup or 1)
    if page.counted_by is not CountedBy.SDK:
        yield _seen("", SectionKind.PLAIN, page.longest_step_s, observations)
        return
    for section in _sections(watched):
        if not section.name:
            yield _seen("", section.kind, section.longest_s, observations)
        elif section.observed:
            yield _seen(section.name, section.kind, section.longest_s, section.observed)


def merged(first: SectionSeen, other: SectionSeen) -> SectionSeen:
    """Merge what two ranks have shown of the same section."""
    return SectionSeen(
        section=first.section,
        kind=first.kind,
        longest_s=max(first.longest_s, other.longest_s),
        observations=first.observations + other.observations,
    )


def in_force(limits: StallLimits, ranks: Collection[WatchedRank]) -> tuple[SectionLimit, ...]:
    """Each limit that can act on these ranks now, or on their next phases."""
    pages = [page for rank in ranks if (page := rank.reading()) is not None]
    kinds = {
        section.name: section.kind for rank in ranks for section in _sections(rank) if section.name
    }
    named = {name: kinds.get(name, SectionKind.PLAIN) for name in {*limits.named(), *kinds}}
    rows = [_row(FIRST_STEP, limits.first_step(), _warmup_text(limits, pages))]
    if _can_step(pages, limits):
        rows.append(_row(STEP, limits.step()))
    rows.append(_row("", limits.section("", SectionKind.PLAIN)))
    beats = any(page.beats and not page.steps for page in pages)
    if beats or limits.by_hand(HEARTBEAT) is not None:
        rows.append(_row(HEARTBEAT, limits.heartbeat()))
    special = {STEP, OUTSIDE, FIRST_STEP, HEARTBEAT}
    return (
        *rows,
        *(
            _row(name, limits.section(name, kind), kind=kind.value)
            for name, kind in sorted(named.items())
            if name not in special
        ),
    )


def _row(name: str, limit: Limit, about: str = "", kind: str = "") -> SectionLimit:
    origin = ", ".join(part for part in (limit.origin, about) if part)
    return SectionLimit(
        section=name, limit_s=round(limit.s, 3), source=limit.source, kind=kind, origin=origin
    )


def _warmup_text(limits: StallLimits, pages: Collection[PageReading]) -> str:
    own_steps = max((page.warmup for page in pages), default=0)
    steps = limits.rules.warmup_steps or own_steps or 1
    return f"for each of the first {steps} steps" if steps > 1 else ""


def _can_step(pages: Collection[PageReading], limits: StallLimits) -> bool:
    """The steps of an unmodified script count as time outside of sections, if that has a limit."""
    counted = {page.counted_by for page in pages}
    is_unmodified = counted == {CountedBy.OPTIMIZER} and limits.by_hand(OUTSIDE) is not None
    return limits.by_hand(STEP) is not None or not is_unmodified


def _beats_regularly(page: PageReading) -> bool:
    until_s = page.first_step_s or page.progress_s
    return page.beats > 1 and until_s - page.first_beat_s >= _REGULAR_S


def _sections(watched: WatchedRank) -> tuple[SectionReading, ...]:
    try:
        return watched.page.sections() if watched.page.read() is not None else ()
    except BadPageError:
        return ()


def _seen(name: str, kind: str, longest_s: float, observations: int) -> SectionSeen:
    return SectionSeen(
        section=name,
        kind=str(kind),
        longest_s=round(longest_s, 6),
        observations=max(0, observations),
    )
