"""Goodput, as REST shows it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer
from everstep_services.history.goodput.ledger import (
    LedgerSegment,
    TimeClass,
    productive_ratio,
    seconds,
)

_SECONDS = Field(
    description="Seconds by class: `productive`, `start_up`, `rendezvous`, `restore`, `heal`, "
    "`checkpoint_stall`, `stall`, `lost_steps`, `straggler_tax`, `idle` and `unknown`. They sum to "
    "`wall_s`."
)
_RATIO = Field(
    description="`productive` over `wall_s`; null where no time has passed, or where no step was "
    "seen and some of the time is `unknown`."
)


class Goodput(Answer):
    """What a job's allocations were used for, within a window."""

    job: str
    since: datetime | None
    """Where the window begins: as requested, or at the first allocation."""
    until: datetime
    """Where the window ends: as requested, or at the end of the last allocation, or now while it
    lasts."""
    wall_s: float = Field(description="The time of the job's allocations within the window.")
    goodput_ratio: float | None = _RATIO
    seconds: dict[str, float] = _SECONDS


class FleetGoodput(Answer):
    """What all jobs' allocations were used for, within a window."""

    since: datetime
    until: datetime
    jobs: int = Field(description="How many jobs had an allocation in the window.")
    is_cut: bool = Field(description="True if there were too many jobs: only the newest count.")
    wall_s: float
    goodput_ratio: float | None = _RATIO
    seconds: dict[str, float] = _SECONDS
    worst: list[Goodput] = Field(description="The jobs that lost the most time, worst first.")


class TimelinePart(Answer):
    """A time that was spent in one way."""

    since: datetime
    until: datetime
    time_class: str = Field(description="One of the classes of goodput, or `mixed`.")
    round: int | None = Field(description="The round; null between rounds.")
    tax_ratio: float = Field(description="The share of it that was lost to slow ranks.")


class Timeline(Answer):
    """What a job's time was spent on, in order."""

    job: str
    items: list[TimelinePart]
    is_coarse: bool
    """True if short parts were merged because there were too many."""


def shown_goodput(
    job: str, parts: Sequence[LedgerSegment], since: datetime | None, until: datetime
) -> Goodput:
    """The sums of these segments within a window."""
    from_s = float("-inf") if since is None else since.timestamp()
    sums = seconds(parts, from_s, until.timestamp())
    begun = since if since is not None or not parts else moment(parts[0].from_s)
    return Goodput(job=job, since=begun, until=until, **ratio_of(sums))


def ratio_of(sums: dict[TimeClass, float]) -> dict[str, Any]:
    """Sums by class with their total, and what is productive of it."""
    wall_s, ratio = sum(sums.values()), productive_ratio(sums)
    return {
        "wall_s": round(wall_s, 3),
        "goodput_ratio": None if ratio is None else round(ratio, 6),
        "seconds": {name: round(lasted_s, 3) for name, lasted_s in sums.items()},
    }


def shown_timeline(job: str, parts: Sequence[LedgerSegment], most: int) -> Timeline:
    """At most `most` parts: of more, the shortest are put together with their neighbours."""
    coarse = _coarse(parts, most)
    items = [
        TimelinePart(
            since=moment(part.from_s), until=moment(part.until_s), time_class=part.time_class,
            round=part.round, tax_ratio=round(part.tax_ratio, 4),
        )
        for part in coarse
    ]  # fmt: skip
    return Timeline(job=job, items=items, is_coarse=len(coarse) < len(parts))


def _coarse(parts: Sequence[LedgerSegment], most: int) -> Sequence[LedgerSegment]:
    if len(parts) <= most:
        return parts
    whole_s = parts[-1].until_s - parts[0].from_s
    least_s = whole_s / most
    merged: list[LedgerSegment] = []
    for part in parts:
        last = merged[-1] if merged else None
        follows = last is not None and last.until_s == part.from_s and last.round == part.round
        if last is not None and follows and last.lasted_s < least_s:
            longest = max(last, part, key=lambda candidate: candidate.lasted_s)
            taxed_s = last.tax_ratio * last.lasted_s + part.tax_ratio * part.lasted_s
            merged[-1] = LedgerSegment(
                last.from_s, part.until_s, longest.time_class, part.round,
                taxed_s / (part.until_s - last.from_s),
            )  # fmt: skip
        else:
            merged.append(part)
    return merged


def moment(at_s: float) -> datetime:
    """Seconds since 1970 as a moment."""
    return datetime.fromtimestamp(at_s, UTC)
