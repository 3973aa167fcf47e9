"""Calculates limits from heartbeats and sections, as NVRx's trainings do."""

import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from trainer_sdk.environment import environ

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.rank_group import RankGroup

Seconds = float
_KEPT = 0.5
"""The share of an earlier calculated limit in a new one."""


@dataclass
class HeartbeatTimeouts:
    """None: no number is known."""

    initial: Seconds | None = None
    subsequent: Seconds | None = None
    were_calculated: bool | None = False

    @property
    def are_valid(self) -> bool:
        """Whether both numbers are known."""
        return self.initial is not None and self.subsequent is not None


@dataclass
class SectionTimeouts:
    """None: no number is known."""

    section: Mapping[str, Seconds | None] = field(default_factory=dict)
    out_of_section: Seconds | None = None
    calculated_sections: Collection[str] = field(default_factory=set)
    is_out_of_section_calculated: bool = False

    @property
    def were_calculated(self) -> bool:
        """Whether the training has calculated all of them."""
        return set(self.calculated_sections) == set(self.section) and (
            self.is_out_of_section_calculated
        )

    @property
    def are_valid(self) -> bool:
        """Whether all numbers are known."""
        are_known = all(limit is not None for limit in self.section.values())
        return are_known and self.out_of_section is not None


class SectionAction(Enum):
    """What happens to a section."""

    OPEN = 1
    CLOSE = 2
    CLOSE_ALL = 3


class TimeoutsCalcError(Exception):
    """An event cannot have happened, or there is not enough data for a number."""


class TimeoutsCalc:
    """The longest times between heartbeats, in sections and outside of them.

    `sections` are the names that may occur; without it, any name may.
    """

    def __init__(
        self,
        sections: Collection[str] | None = None,
        start_time: Seconds | None = None,
        safety_factor: float = 5.0,
    ) -> None:
        self.start_time = time.monotonic() if start_time is None else start_time
        self.safety_factor = safety_factor
        self.count = 0
        """The number of heartbeats."""
        self._names = None if sections is None else frozenset(sections)
        self._longest = _Longest()
        self._last_beat: Seconds | None = None
        self._open: dict[str, Seconds] = {}
        self._outside_since: Seconds | None = self.start_time

    def reset_start_time(self) -> None:
        """Begin now."""
        self.start_time = self._outside_since = time.monotonic()

    @property
    def is_out_of_section(self) -> bool:
        """Whether no section is open."""
        return not self._open

    def update_on_heartbeat(self, hb_time: Seconds | None = None) -> None:
        """Note a heartbeat."""
        now = time.monotonic() if hb_time is None else hb_time
        longest = self._longest
        if self._last_beat is None:
            longest.initial = max(longest.initial, now - self.start_time)
        else:
            longest.subsequent = max(longest.subsequent, now - self._last_beat)
        self._last_beat = now
        self.count += 1

    def update_on_section_event(
        self, section: str | None, action: SectionAction, event_time: Seconds | None = None
    ) -> None:
        """Note that a section, or for `CLOSE_ALL` each open section, begins or ends."""
        now = time.monotonic() if event_time is None else event_time
        if action is SectionAction.CLOSE_ALL:
            for name in list(self._open):
                self._close(name, now)
            return
        if section is None or (self._names is not None and section not in self._names):
            raise TimeoutsCalcError(f"there is no section {section!r}")
        if action is SectionAction.OPEN:
            self._begin(section, now)
        else:
            self._close(section, now)

    def maybe_bump_oos_time(self, curr_time: Seconds | None = None) -> None:
        """Count the time outside sections up to now, if none is open."""
        now = time.monotonic() if curr_time is None else curr_time
        if self._outside_since is not None:
            self._longest.outside = max(self._longest.outside, now - self._outside_since)

    def synchronize_all(self, group: "RankGroup | None" = None) -> None:
        """Take the longest times of all ranks, which make this call together."""
        group = group or _all_ranks()
        if group is None:
            return
        values = {**self._longest.values, "count": float(self.count)}
        merged: dict[str, float] = {}
        for own in group.gather(values, dict[str, float]):
            for name, value in own.items():
                merged[name] = max(merged.get(name, 0.0), value)
        self.count = int(merged.pop("count"))
        self._longest = _Longest.of(merged)

    def can_get_hb_timeouts(self) -> bool:
        """Whether there were two heartbeats."""
        return self.count >= 2

    def get_hb_timeouts(self, current: HeartbeatTimeouts | None = None) -> HeartbeatTimeouts:
        """The limits of heartbeats; the mean with those in `current` that were calculated."""
        if not self.can_get_hb_timeouts():
            raise TimeoutsCalcError("there were fewer than two heartbeats")
        initial, subsequent = (
            self._limit(self._longest.initial),
            self._limit(self._longest.subsequent),
        )
        if current is not None and current.were_calculated:
            initial = _merged(initial, current.initial)
            subsequent = _merged(subsequent, current.subsequent)
        return HeartbeatTimeouts(initial, subsequent, were_calculated=True)

    def can_get_section_timeouts(
        self, selected_sections: Collection[str] | None = None, calc_out_of_section: bool = True
    ) -> bool:
        """Whether each of these sections has ended once, and some time was outside of them."""
        wanted = self._selected(selected_sections)
        is_known = bool(wanted or calc_out_of_section)
        return (
            is_known
            and all(name in self._longest.sections for name in wanted)
            and (not calc_out_of_section or self._longest.outside > 0)
        )

    def get_section_timeouts(
        self,
        selected_sections: Collection[str] | None = None,
        calc_out_of_section: bool = True,
        current: SectionTimeouts | None = None,
    ) -> SectionTimeouts:
        """The limits of sections; a number that is not calculated now stays as in `current`."""
        if not self.can_get_section_timeouts(selected_sections, calc_out_of_section):
            raise TimeoutsCalcError("a section has not ended yet, or no time was outside sections")
        before = current or SectionTimeouts()
        sections = {**dict.fromkeys(self._names or ()), **before.section}
        calculated = set(before.calculated_sections)
        for name in self._selected(selected_sections):
            limit = self._limit(self._longest.sections[name])
            was = before.section.get(name) if name in calculated else None
            sections[name] = _merged(limit, was)
            calculated.add(name)
        outside = before.out_of_section
        if calc_out_of_section:
            was = outside if before.is_out_of_section_calculated else None
            outside = _merged(self._limit(self._longest.outside), was)
        is_outside = calc_out_of_section or before.is_out_of_section_calculated
        return SectionTimeouts(sections, outside, calculated, is_outside)

    def _selected(self, sections: Collection[str] | None) -> Collection[str]:
        if sections is not None:
            return sections
        return self._longest.sections if self._names is None else self._names

    def _limit(self, longest: Seconds) -> Seconds:
        return self.safety_factor * longest

    def _begin(self, section: str, now: Seconds) -> None:
        if section in self._open:
            raise TimeoutsCalcError(f"section {section!r} is open already")
        if self._outside_since is not None:
            self._longest.outside = max(self._longest.outside, now - self._outside_since)
            self._outside_since = None
        self._open[section] = now

    def _close(self, section: str, now: Seconds) -> None:
        if section not in self._open:
            raise TimeoutsCalcError(f"section {section!r} is not open")
        took = now - self._open.pop(section)
        sections = self._longest.sections
        sections[section] = max(sections.get(section, 0.0), took)
        if not self._open:
            self._outside_since = now


@dataclass
class _Longest:
    """The longest times so far; 0 where there was none."""

    initial: Seconds = 0.0
    subsequent: Seconds = 0.0
    outside: Seconds = 0.0
    sections: dict[str, Seconds] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Seconds]:
        sections = {f"section {name}": took for name, took in self.sections.items()}
        return {
            "initial": self.initial,
            "subsequent": self.subsequent,
            "outside": self.outside,
            **sections,
        }

    @classmethod
    def of(cls, values: Mapping[str, Seconds]) -> "_Longest":
        sections = {
            name.removeprefix("section "): took
            for name, took in values.items()
            if name.startswith("section ")
        }
        return cls(values["initial"], values["subsequent"], values["outside"], sections)


def _all_ranks() -> "RankGroup | None":
    if "torch" not in sys.modules:
        return None  # a script without torch has no other ranks to ask
    from trainer_sdk.checkpoint.rank_group import group_of_all

    return group_of_all(environ.get("WORLD_SIZE", ""))


def _merged(new: Seconds, former: Seconds | None) -> Seconds:
    return new if former is None else (1 - _KEPT) * new + _KEPT * former
