"""When lines were written, and which of two was certainly earlier although clocks differ.

Ranks of a training print a step at about the same time. From steps that two clocks have both
printed, the offset between them is learned. Where there are too few, clocks may be wrong by
`SKEW_S`, and times of different formats by a time zone, too.
"""

import math
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from statistics import median

import msgspec

SKEW_S = 300.0
"""How wrong a clock may be that nothing is known of."""
ZONE_S = 15 * 3600.0
"""How far times of two programs of one moment may lie apart: the largest time zone and the skew."""
_LEAST_STEPS = 3
_LEAST_UNCERTAINTY_S = 0.5
_MOST_SPREAD_S = 30.0
_LOOKED_AT = 200
_MOST_STEPS = 256
_FULL = re.compile(
    r"(\d{4})[-/](\d\d)[-/](\d\d)[T _](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?"
)
_GLOG = re.compile(r"\b[IWEF](\d{2})(\d{2}) (\d\d):(\d\d):(\d\d)(?:\.(\d{1,9}))?")
_SYSLOG = re.compile(
    r"\b([A-Z][a-z]{2}) +(\d{1,2}) (\d\d):(\d\d):(\d\d)(?: (?:[A-Z]{3,4} )?(\d{4}))?"
)
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_STEP = re.compile(r"(?i)\b(?:iter(?:ation)?|(?:global_)?step)\W{0,12}(\d{1,12})\b")


def seconds(text: str, year: int) -> float | None:
    """The time that a line begins with, in any usual format; `year` where the line has none."""
    head = text[:_LOOKED_AT]
    try:
        if full := _FULL.search(head):
            zone = (full[8] or "").replace("Z", "+00:00")
            parts = f"{full[1]}-{full[2]}-{full[3]}T{full[4]}:{full[5]}:{full[6]}{zone}"
            return _stamp(datetime.fromisoformat(parts), full[7])
        if glog := _GLOG.search(head):
            parts = f"{year}-{glog[1]}-{glog[2]}T{glog[3]}:{glog[4]}:{glog[5]}"
            return _stamp(datetime.fromisoformat(parts), glog[6])
        if (syslog := _SYSLOG.search(head)) and syslog[1] in _MONTHS:
            day = f"{int(syslog[6] or year):04}-{_MONTHS[syslog[1]]:02}-{int(syslog[2]):02}"
            parts = f"{day}T{syslog[3]}:{syslog[4]}:{syslog[5]}"
            return _stamp(datetime.fromisoformat(parts), None)
    except (ValueError, OverflowError, OSError):
        return None
    return None


def year_of(text: str) -> int | None:
    """The year that a line has."""
    full = _FULL.search(text[:_LOOKED_AT])
    return int(full[1]) if full and full[1] > "1970" else None


def place_of_year(text: str) -> int | None:
    """The index of the year in a line with a date."""
    full = _FULL.search(text[:_LOOKED_AT])
    return full.start(1) if full else None


def step_of(text: str) -> int | None:
    """The step that a line about progress counts."""
    match = _STEP.search(text)
    return int(match[1]) if match else None


def _stamp(when: datetime, fraction: str | None) -> float:
    return when.timestamp() + (float(f"0.{fraction}") if fraction else 0.0)


class Offset(msgspec.Struct, frozen=True):
    """How far a clock is ahead of the reference, and how far that may be wrong."""

    ahead_s: float
    uncertainty_s: float


class Clocks:
    """The clocks of all origins, as far as their steps tell."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[int, float]] = {}
        self.latest: float | None = None
        """When the last step was printed, by whichever clock."""

    def observe(self, clock: str, step: int, at: float) -> None:
        """A clock has printed a step; of repeated ones the first counts."""
        steps = self._steps.setdefault(clock, {})
        if len(steps) < _MOST_STEPS:
            steps.setdefault(step, at)
        self.latest = at if self.latest is None else max(self.latest, at)

    def offsets(self) -> Mapping[str, Offset]:
        """The offset of each clock that shares enough steps with the reference."""
        if not self._steps:
            return {}
        reference = max(self._steps, key=lambda clock: len(self._steps[clock]))
        base = self._steps[reference]
        offsets: dict[str, Offset] = {}
        for clock, steps in self._steps.items():
            ahead = [at - base[step] for step, at in steps.items() if step in base]
            if len(ahead) < _LEAST_STEPS:
                continue
            middle = median(ahead)
            spread = max(abs(lead - middle) for lead in ahead)
            if spread <= _MOST_SPREAD_S:
                offsets[clock] = Offset(middle, max(_LEAST_UNCERTAINTY_S, 2 * spread))
        return offsets


class Moment(msgspec.Struct, frozen=True):
    """When something was written, by which clock."""

    clock: str
    at: float


class Earliest:
    """Of many moments, which are certainly later than another."""

    def __init__(self, moments: Iterable[Moment], offsets: Mapping[str, Offset]) -> None:
        self._offsets = offsets
        self._of_clock: dict[str, float] = {}
        for moment in moments:
            self._of_clock[moment.clock] = min(
                moment.at, self._of_clock.get(moment.clock, math.inf)
            )
        times = [
            at - offsets[clock].ahead_s + offsets[clock].uncertainty_s
            for clock, at in self._of_clock.items()
            if clock in offsets
        ]
        self._known = min(times, default=math.inf)
        self._unknown = min(
            (at for clock, at in self._of_clock.items() if clock not in offsets), default=math.inf
        )
        self._any = min(self._of_clock.values(), default=math.inf)

    def is_before(self, moment: Moment, margin_s: float) -> bool:
        """Whether another moment was certainly earlier, by more than a margin."""
        at = moment.at - margin_s
        if self._of_clock[moment.clock] < at:
            return True
        offset = self._offsets.get(moment.clock)
        if offset is None:
            return self._any + 2 * SKEW_S < at
        return (
            self._known < at - offset.ahead_s - offset.uncertainty_s
            or self._unknown + 2 * SKEW_S < at
        )
