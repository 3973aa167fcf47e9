"""The policy on slow ranks: stop the job, or exclude the node.

A finding by itself ends nothing. No other node can repair an effect of the script or its data.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from everstep.messages import KnownStraggler
from everstep.slow_rank_causes import CURABLE
from everstep_services.straggler.domain.switches import Mode, StragglerSwitches

Action = Literal["stop", "exclude"]
ActionOutcome = Literal["asked", "observed", "refused"]


@dataclass(frozen=True, slots=True)
class StragglerDecision:
    """The action on one finding, real or only observed."""

    action: Action
    finding: str
    mode: Mode
    reason: str


@dataclass(slots=True)
class _Record:
    since: float
    """When this replica first knew of the finding, by its monotonic clock."""
    reports: int = 0
    """Windows in a row with a score below the limit."""


class Policy:
    """Counts windows and seconds for the open findings of one job."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}
        self._window: int | None = None

    def report(
        self,
        stragglers: Collection[KnownStraggler],
        slower_ratios: Mapping[int, float],
        window: int,
        switches: StragglerSwitches,
        now: float,
    ) -> None:
        """Take a window in, once: how much slower each rank is than its role group's median."""
        is_new, self._window = window != self._window, window
        for straggler in stragglers:
            record = self._records.setdefault(straggler.finding, _Record(now))
            if not is_new:
                continue
            is_below = score(slower_ratios.get(straggler.rank, 0.0)) < switches.stop_below
            record.reports = record.reports + 1 if is_below else 0
        open_ = {straggler.finding for straggler in stragglers}
        self._records = {key: record for key, record in self._records.items() if key in open_}

    def due(
        self, stragglers: Iterable[KnownStraggler], switches: StragglerSwitches, now: float
    ) -> list[StragglerDecision]:
        """The decisions that the rules ask for now; at most one action a finding."""
        decisions: list[StragglerDecision] = []
        for straggler in stragglers:
            record = self._records.get(straggler.finding)
            if record is None:
                continue
            decision = _stop(straggler, record, switches) or _exclude(
                straggler, record, switches, now
            )
            if decision is not None:
                decisions.append(decision)
        return decisions


def score(slower_ratio: float) -> float:
    """1 for a rank that is as fast as the median, 0.5 for one that takes twice as long."""
    return 1 / (1 + max(slower_ratio, 0.0))


def _stop(
    straggler: KnownStraggler, record: _Record, switches: StragglerSwitches
) -> StragglerDecision | None:
    if straggler.cause not in CURABLE or "stop" in straggler.acted:
        return None
    if record.reports < switches.stop_reports:
        return None
    reason = (
        f"rank {straggler.rank} scores below {switches.stop_below:g} in {record.reports} windows "
        f"in a row, limit {switches.stop_reports}: {straggler.reason}"
    )
    return StragglerDecision("stop", straggler.finding, switches.stop_mode, reason)


def _exclude(
    straggler: KnownStraggler, record: _Record, switches: StragglerSwitches, now: float
) -> StragglerDecision | None:
    slow_s, confidence = now - record.since, straggler.confidence or 0.0
    if straggler.cause not in switches.exclude_causes or "exclude" in straggler.acted:
        return None
    if slow_s < switches.exclude_after_s or confidence < switches.exclude_confidence:
        return None
    reason = (
        f"rank {straggler.rank} is slow ({straggler.cause}, confidence {confidence:.2f}, limit "
        f"{switches.exclude_confidence:g}) for {slow_s:.0f} s, limit "
        f"{switches.exclude_after_s:g} s: {straggler.reason}"
    )
    return StragglerDecision("exclude", straggler.finding, switches.exclude_mode, reason)
