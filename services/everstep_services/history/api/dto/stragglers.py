"""Slow ranks, as REST shows them: those of the past, how ranks compare now, and their times."""

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from pydantic import Field

from everstep.store.projected.stragglers import ACTIONS
from everstep.store.queries import Record
from everstep_services.history.api.dto.answer import Answer, present


class ScoreOut(Answer):
    """One signal about a rank: 1 is as fast as the reference, 0.5 takes twice as long."""

    signal: str = Field(examples=["own"])
    """`own` (its own time), `section:NAME`, `cpu`, `runnable` or `gpu`."""
    relative_score: float | None
    """The score relative to the median of the rank's role group."""
    individual_score: float | None
    """The score relative to the rank's own best window."""
    value_s: float | None = Field(description="The rank's median in the window.")
    reference_s: float | None = Field(description="The role group's median in the window.")


class SlowRankAction(Answer):
    """What the policy for slow ranks asked for, because of one finding."""

    action: str = Field(description="`stop` (the job) or `exclude` (the node).")
    outcome: str | None = Field(description="`asked`, `observed` or `refused`.")
    reason: str | None = Field(description="The rule, its numbers, and the answer.")
    at: datetime | None


class SlowRank(Answer):
    """A finding: a rank was slower than its peers for some windows, and why."""

    id: str = Field(description="The finding: the id of its fact.")
    n: int | None
    job: str
    state: str = Field(examples=["open"])
    """`open`, or `cleared` once the rank keeps up again or its round is over."""
    round: int | None
    rank: int | None
    node: str | None
    slot: int | None
    role: str | None = Field(description="The role group that the rank was compared with.")
    cause: str | None = Field(examples=["input"])
    """`input`, `compute`, `host`, `network`, `device`, `design` or `unknown`."""
    reason: str | None = Field(description="The numbers, and the limits that they passed.")
    section: str | None = Field(description="The section in which the rank loses time.")
    scores: list[ScoreOut] | None
    """The signals that show it, the strongest first."""
    slower_ratio: float | None
    """How much longer the rank's own time was than the median of its role group: 0.1 for 10 %."""
    lateness_s: float | None = Field(description="How late the rank enters collectives, median.")
    slowdown_ratio: float | None
    """How much faster the whole job would be without the rank's delay: 0.12 for 12 %."""
    lost_s: float | None
    """The time that the whole job lost by it, window by window; null while open."""
    windows: int | None
    """In how many windows in a row the rank was slow when it was found."""
    confidence: float | None = Field(description="The confidence in the cause, 0 to 1.")
    failure_class: str | None
    """The remedy: `reset`, `replace`, `watch`, or `tune` (the script)."""
    found_at: datetime | None
    cleared_at: datetime | None
    cleared_reason: str | None
    lasted_s: float | None
    actions: list[SlowRankAction]
    """The actions that the policy requested, in order."""
    action: str | None
    """`stop` or `exclude`: one of `actions`, for clients that know no list."""
    action_outcome: str | None = Field(description="`asked`, `observed` or `refused`.")
    action_reason: str | None
    acted_at: datetime | None


def shown_slow_rank(row: Record) -> SlowRank:
    """A finding as a client sees it: with how much slower than its peers the rank was."""
    fields = present(row)
    return SlowRank(
        **fields, slower_ratio=_slower_ratio(fields["scores"] or ()), actions=_actions(fields)
    )


def _actions(fields: Record) -> list[SlowRankAction]:
    actions = [
        SlowRankAction(
            action=action,
            outcome=fields[f"{action}_outcome"],
            reason=fields[f"{action}_reason"],
            at=fields[f"{action}_at"],
        )
        for action in ACTIONS
        if fields[f"{action}_fact"] is not None
    ]
    return sorted(
        actions,
        key=lambda action_taken: (action_taken.at is None, action_taken.at, action_taken.action),
    )


def _slower_ratio(scores: Iterable[Mapping[str, Any]]) -> float | None:
    relative = next((score["relative_score"] for score in scores if score["signal"] == "own"), None)
    return 1 / relative - 1 if relative else None


class RankNowOut(Answer):
    """How one rank compares with its role group, in the newest window."""

    rank: int
    node: str
    role: str
    is_straggler: bool = Field(description="True if the rank is slow by the rules in force.")
    own_s: float | None = Field(description="The rank's own time in a step.")
    slower_ratio: float | None
    """How much longer the own time is than the median of the rank's role group: 0.1 for 10 %."""
    lateness_s: float | None
    """By how much it enters collectives later than the others, in the median."""
    waited_s: float | None = Field(description="How long the rank waits for others in a step.")
    scores: list[ScoreOut]


class GroupNow(Answer):
    """Which ranks wait for which in one process group."""

    group: str
    ranks: int = Field(description="How many ranks of the group were compared.")
    last_rank: int | None = Field(description="The rank that was the last to enter most often.")
    last_ratio: float = Field(description="The share of collectives which that rank entered last.")
    waited_s: float = Field(description="How long the others wait for the last rank in a step.")


class RanksCompared(Answer):
    """How the ranks of a job compare now, and which of them were found to be slow."""

    job: str
    round: int
    window: int = Field(description="The last step of the newest window; 0 while there is none.")
    window_steps: int = Field(description="The number of steps of a window.")
    step_s: float | None = Field(description="The duration of a step.")
    slowdown_ratio: float | None
    """How much faster the job would be without its slow ranks: 0.12 for 12 %."""
    ranks: list[RankNowOut] = Field(description="The slowest first.")
    ranks_seen: int = Field(description="The number of ranks that were compared.")
    ranks_missing: int = Field(description="Ranks of the round that have sent no timings.")
    groups: list[GroupNow] = Field(description="The process groups in which ranks wait longest.")
    clock_error_s: float | None = Field(description="Clocks of nodes are aligned to within this.")
    is_on: bool = Field(description="Timings are switched on.")
    is_by_time: bool
    """The script counts no steps: a step is a second since 1970, and times are per second."""
    note: str | None = Field(description="Why the answer is empty or incomplete.")
    found: list[SlowRank] = Field(description="The open findings in the record.")


class WindowOut(Answer):
    """Steps that were measured together."""

    first_step: int
    last_step: int


class RankTimes(Answer):
    """One rank in each window."""

    rank: int
    node: str
    role: str
    values: list[float | None]
    """The value of each window; null where nothing is known."""


class Timings(Answer):
    """Ranks by windows, as for a heat map."""

    job: str
    round: int
    measure: str = Field(examples=["own"])
    """The measure that the values are of, in seconds per step or as a ratio."""
    section: str | None
    windows: list[WindowOut] = Field(description="The windows, the oldest first.")
    rows: list[RankTimes] = Field(description="The rows, by rank.")
    next_rank: int | None = Field(description="The `first_rank` of the next page; null at the end.")
    sections: list[str] = Field(description="The sections that a request may name.")
    is_by_time: bool
    """The script counts no steps: a step is a second since 1970, and times are per second."""


class StepShift(Answer):
    """A change of the step time of the whole job, without a slow rank."""

    id: str = Field(description="The id of its fact.")
    n: int | None
    job: str
    round: int | None
    at: datetime | None
    step: int | None = Field(description="The step at which it changed.")
    before_s: float | None = Field(description="The median step before.")
    now_s: float | None = Field(description="The median step after.")
    section: str | None = Field(description="The section in which most of the change is.")
    reason: str | None
