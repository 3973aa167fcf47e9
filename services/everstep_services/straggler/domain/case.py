"""What the parts of a report are made from: the steps that count, own times, roles, suspects."""

from dataclasses import dataclass, replace

import numpy as np

from everstep_services.straggler.domain import whatif
from everstep_services.straggler.domain.arrays import dense
from everstep_services.straggler.domain.dependencies import Trace
from everstep_services.straggler.domain.operations import Array, Operations
from everstep_services.straggler.domain.own_time import OwnTime, amounts, own_time
from everstep_services.straggler.domain.roles import role_groups
from everstep_services.straggler.domain.suspects import TraceSuspect, slow_groups, slow_ranks
from everstep_services.straggler.domain.verdict import SlownessLimits
from everstep_services.straggler.domain.whatif import Decomposed

_WINDOW_STEPS = 10


class NothingToCompareError(ValueError):
    """A trace without two complete steps, or with one rank."""


@dataclass(frozen=True, slots=True)
class TraceCase:
    """All that the parts of a report are made from."""

    parts: Decomposed
    own_time: OwnTime
    roles: tuple[str, ...]
    role: Array
    """Of each rank, an index into `roles`."""
    amount: Array
    suspects: tuple[TraceSuspect, ...]
    window: int
    limits: SlownessLimits
    scored: Array
    """Ranks × windows: own time over the role group's median, less 1."""
    unjudged: str
    """Why no rank could be judged; empty if one could."""

    @property
    def trace(self) -> Trace:
        return self.parts.trace

    @property
    def row_role(self) -> Array:
        roles: Array = self.role[self.trace.rank]
        return roles


def complete(table: Operations, notes: list[str]) -> Operations:
    """Only steps that every rank has."""
    ranks, rank = dense(table.rank)
    steps, step = dense(table.step)
    if len(ranks) < 2:
        raise NothingToCompareError("it has one rank only: there is nothing to compare with")
    seen = np.zeros((len(steps), len(ranks)), dtype=bool)
    seen[step, rank] = True
    whole = np.asarray(seen.all(axis=1))
    if whole.sum() < 2:
        raise NothingToCompareError(
            f"{int(whole.sum())} of its {len(steps)} steps are there on all of its "
            f"{len(ranks)} ranks, and two are needed"
        )
    if whole.all():
        return table
    notes.append(f"{int((~whole).sum())} steps that not all ranks have were left out")
    return table.take(np.flatnonzero(whole[step]))


_OVERLAP = 0.5


def one_after_another(table: Operations, notes: list[str]) -> Operations:
    """The table with its steps laid end to end, if each counts times from its own beginning."""
    steps, step = dense(table.step)
    ranks, rank = dense(table.rank)
    first, last = np.full((2, len(steps), len(ranks)), np.inf)
    np.minimum.at(first, (step, rank), table.start)
    np.minimum.at(last, (step, rank), -table.end)
    last = -last
    common = np.minimum(last[1:], last[:-1]) - np.maximum(first[1:], first[:-1])
    shorter = np.minimum((last - first)[1:], (last - first)[:-1])
    if float(np.median(common / np.maximum(shorter, 1e-12))) < _OVERLAP:
        return table
    notes.append("its steps overlap: each counts from its own beginning; they were laid end to end")
    begins, ends = first.min(axis=1), last.max(axis=1)
    offset = np.r_[0.0, np.cumsum(ends - begins)[:-1]] - begins
    return replace(table, start=table.start + offset[step])


def case_of(
    parts: Decomposed, limits: SlownessLimits, window: int | None, notes: list[str]
) -> TraceCase:
    trace = parts.trace
    named = role_groups(trace.table)
    roles = tuple(dict.fromkeys(named.values()))
    role = np.array([roles.index(named[int(rank)]) for rank in trace.ranks])
    kept = parts.kept
    _say_dropped(parts, notes)
    steps = kept if len(kept) >= 2 else np.arange(len(trace.steps))
    amount = amounts(parts)
    times = own_time(parts, steps, amount)
    width = window or max(1, min(_WINDOW_STEPS, len(steps) // 6))
    ranks = slow_ranks(times, role, width, limits)
    groups = slow_groups(parts, steps, width, limits)
    for name, count in zip(roles, np.bincount(role), strict=True):
        if count < limits.peers:
            notes.append(f"role {name!r} has {count} ranks, too few to tell a slow one")
    return TraceCase(
        parts=parts,
        own_time=times,
        roles=roles,
        role=role,
        amount=amount,
        suspects=(*ranks.suspects, *groups),
        window=width,
        limits=limits,
        scored=ranks.ratios,
        unjudged=_unjudged(parts, np.bincount(role), ranks.ratios, limits),
    )


def _unjudged(parts: Decomposed, members: Array, ratios: Array, limits: SlownessLimits) -> str:
    """Why nothing that was compared can tell a slow rank; empty if something can."""
    least, windows = limits.horizons[0][0], ratios.shape[1]
    if not len(parts.kept):
        most = f"{whatif.MOST_ERROR * 100:g} % by the dependencies of its operations"
        return (
            f"none of its {len(parts.error)} steps is reproduced to {most}; do its files "
            "contradict each other?"
        )
    if members.max() < limits.peers:
        most = f"the largest of its roles has {members.max()} ranks"
        return f"{most}, and {limits.peers} are needed to tell a slow one"
    if windows < least:
        most = f"of {least} windows that are needed, its steps make {windows}"
        return f"{most}: give more steps, or a smaller --window"
    if not np.isfinite(ratios).any():
        return "no rank has time of its own"
    return ""


def _say_dropped(parts: Decomposed, notes: list[str]) -> None:
    dropped = len(parts.error) - len(parts.kept)
    if dropped:
        notes.append(
            f"{dropped} of {len(parts.error)} steps are not reproduced to "
            f"{whatif.MOST_ERROR * 100:g} % by their dependencies, and were left out"
        )
    if not len(parts.kept):
        notes.append("no step could be replayed: prices are missing")


def row_means(values: Array) -> Array:
    counted = np.isfinite(values)
    total = np.where(counted, values, 0.0).sum(axis=1)
    means: Array = np.where(counted.any(axis=1), total / np.maximum(counted.sum(axis=1), 1), np.nan)
    return means
