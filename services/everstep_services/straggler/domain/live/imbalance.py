"""Roles that have more to do than others: by design, so that no rank is to blame."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from everstep.messages import Score
from everstep_services.straggler.domain.arrays import finite_median, medians_by
from everstep_services.straggler.domain.changes import KeepsUp, SlowRankFound
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.operations import Array

_WINDOWS = 6
"""This many windows in a row make a role uneven, or even again."""
_CONFIDENCE = 0.8
_LOW = 10.0
"""The percentile of a role that must be above all other roles, too: else some ranks are slow."""


@dataclass(frozen=True, slots=True)
class _Role:
    """One role in one window."""

    name: str
    rows: Array
    own_s: float
    """The median of its ranks."""
    mean_s: float
    """Of the medians of all roles: what each would need if they were even."""
    is_apart: bool
    """Nearly all of its ranks need more than those of any other role."""

    @property
    def lost_s(self) -> float:
        return self.own_s - self.mean_s


@dataclass(slots=True)
class Imbalance:
    """The roles of a round, from window to window."""

    uneven: dict[str, int] = field(default_factory=dict)
    """The roles that are uneven, each with the rank that it is reported under."""
    adopted: set[int] = field(default_factory=set)
    """Such ranks of findings that another replica made."""
    above: dict[str, int] = field(default_factory=dict)
    """For how many windows in a row each role was above the limit."""
    below: dict[str, int] = field(default_factory=dict)
    lost_s: dict[int, float] = field(default_factory=dict)
    """By such a rank, what its role cost a step in the last window."""

    def adopt(self, rank: int) -> None:
        """Take over a finding that another replica made."""
        if rank not in self.uneven.values():
            self.adopted.add(rank)

    def observe(
        self, number: int, measured: Measured, ratio: float
    ) -> list[SlowRankFound | KeepsUp]:
        """Take in a window. A role is uneven if steps lose that share by it, for long enough."""
        roles = _roles(measured)
        for name in self.uneven.keys() - {role.name for role in roles}:
            self.adopted.add(self.uneven.pop(name))  # roles are named anew as groups are learned
        for role in roles:
            ranks = measured.sample.rank[role.rows]
            mine = self.adopted.intersection(ranks.tolist())
            if mine:
                self.uneven[role.name] = min(mine)
                self.adopted -= mine
        changes: list[SlowRankFound | KeepsUp] = []
        for role in roles:
            changes += self._judge(number, measured, role, ratio)
        self.lost_s = {
            self.uneven[role.name]: role.lost_s for role in roles if role.name in self.uneven
        }
        return changes

    def _judge(
        self, number: int, measured: Measured, role: _Role, ratio: float
    ) -> list[SlowRankFound | KeepsUp]:
        lost = role.lost_s / measured.step_s if measured.step_s > 0 else 0.0
        is_above = role.is_apart and lost >= ratio
        self.above[role.name] = self.above.get(role.name, 0) + 1 if is_above else 0
        self.below[role.name] = self.below.get(role.name, 0) + 1 if lost < ratio / 2 else 0
        if role.name not in self.uneven and self.above[role.name] >= _WINDOWS:
            finding = _finding(number, measured, role, ratio)
            self.uneven[role.name] = finding.rank
            return [finding]
        if role.name in self.uneven and self.below[role.name] >= _WINDOWS:
            reason = (
                f"role {role.name} needs {role.own_s * 1e3:.1f} ms of each step, and all roles "
                f"{role.mean_s * 1e3:.1f} ms in the mean, for {_WINDOWS} windows"
            )
            return [KeepsUp(number, self.uneven.pop(role.name), reason, is_design=True)]
        return []


def _roles(measured: Measured) -> list[_Role]:
    """Return the roles with known own times, if there are several."""
    finite = np.flatnonzero(np.isfinite(measured.own_s))
    own_s, role = measured.own_s[finite], measured.role[finite]
    medians = medians_by(role, own_s, len(measured.roles))
    is_finite = np.flatnonzero(np.isfinite(medians))
    if len(is_finite) < 2:
        return []
    mean_s, uneven = float(medians[is_finite].mean()), []
    for number in is_finite.tolist():
        others = float(medians[is_finite[is_finite != number]].max())
        low = float(np.percentile(own_s[role == number], _LOW))
        uneven.append(
            _Role(
                name=measured.roles[number], rows=finite[role == number],
                own_s=float(medians[number]), mean_s=mean_s, is_apart=low > others,
            )
        )  # fmt: skip
    return uneven


def _finding(number: int, measured: Measured, role: _Role, ratio: float) -> SlowRankFound:
    """The finding, under the lowest rank of the role, which is as little to blame as the others."""
    row, step_s, lost_s = int(role.rows[0]), measured.step_s, role.lost_s
    rank = int(measured.sample.rank[row])
    reason = (
        f"all {len(role.rows)} ranks of role {role.name} need {role.own_s * 1e3:.1f} ms of each "
        f"step of {step_s * 1e3:.1f} ms by themselves ({role.own_s / step_s * 100:.0f} %), and the "
        f"{len(measured.roles)} roles {role.mean_s * 1e3:.1f} ms in the mean: "
        f"{lost_s / step_s * 100:.0f} % of the step would be saved if they were even (limit "
        f"{ratio * 100:g} %), for {_WINDOWS} windows. No rank is to blame; rank {rank} stands for "
        f"its role"
    )
    score = Score(
        signal="own", value_s=role.own_s, reference_s=role.mean_s,
        relative_score=role.mean_s / role.own_s if role.own_s > 0 else None,
    )  # fmt: skip
    return measured.finding(
        number, row, cause="design", reason=reason, section=_section(measured, role),
        scores=(score,), lateness_s=None, slower_ratio=role.own_s / role.mean_s - 1, lost_s=lost_s,
        slowdown_ratio=lost_s / (step_s - lost_s), windows=_WINDOWS, confidence=_CONFIDENCE,
    )  # fmt: skip


def _section(measured: Measured, role: _Role) -> str | None:
    """The section that has most of what the role needs more than others."""
    others = np.setdiff1d(np.arange(len(measured.role)), role.rows)
    excess: Mapping[str, float] = {
        name: finite_median(times[role.rows]) - finite_median(times[others])
        for name, times in zip(measured.sections.names, measured.own_sections_s.T, strict=True)
        if name
    }
    finite = {name: value for name, value in excess.items() if np.isfinite(value)}
    worst = max(finite, key=lambda name: finite[name], default=None)
    return worst if worst is not None and finite[worst] > role.lost_s / 2 else None
