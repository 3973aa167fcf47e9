"""The report of a trace's analysis, as data."""

from dataclasses import dataclass, field
from typing import Literal

from everstep.slow_rank_causes import SlowRankCause

PartKind = Literal["compute", "collective", "send", "receive", "wait", "gap", ""]
"""Empty for a role."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rank, or ranks of one process group, that are slow for a reason of their own."""

    kind: Literal["rank", "group"]
    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    role: str
    cause: SlowRankCause
    slower_ratio: float
    """How much slower than the median of its role group: 0.1 for 10 %."""
    lost_s: float
    """Its own loss in each step."""
    price_ratio: float | None
    """How much faster the job would be without it; None if no step could be replayed."""
    confidence: float
    first_step: int
    last_step: int
    cleared: bool
    """Whether it keeps up again at the end of the trace."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Design:
    """Uneven work that roles or lengths of sequences explain: no rank is at fault."""

    what: Literal["uneven stages", "sequence lengths"]
    role: str
    ranks: tuple[int, ...]
    slower_ratio: float
    price_ratio: float | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    rank: int
    host: str
    role: str
    own_s: float
    """Its own time a step, in the median."""
    slower_ratio: float | None
    """How much slower than its role group's median; None where it has no peers."""
    late_s: float | None
    """Behind the first one to enter collectives, in the median."""
    relative_score: float | None
    """NVRx's, over computations."""
    individual_score: float | None
    price_ratio: float | None
    """None if it was not replayed: only those that are slower than others are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRow:
    """An operation or a role: its time, and what the job would save if it were even."""

    name: str
    kind: PartKind
    own_s: float
    """The mean time a step and rank."""
    price_ratio: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    step: int
    duration_s: float
    slowdown_ratio: float | None
    """Over the step with all ranks alike; None if it was not replayed."""
    error_ratio: float | None
    """Of its replay; None if it could not be replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A part of the job's time that would be saved without its cause."""

    cause: str
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Ranks × steps: own time over the median of the role group in the same step."""

    ranks: tuple[int, ...]
    steps: tuple[int, ...]
    """The first step of each column."""
    ratios: tuple[tuple[float | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    rows: int
    ranks: int
    steps: int
    window_steps: int
    roles: dict[str, int]
    """The number of ranks of each role."""
    schedule: str
    step_s: float
    """In the median."""
    slowdown_ratio: float | None
    """T over T ideal: 1.1 where all ranks alike would save 10 % of the ideal time."""
    replay_error_ratio: float | None
    findings: tuple[Finding, ...]
    designs: tuple[Design, ...]
    shares: tuple[Share, ...]
    rank_rows: tuple[RankRow, ...]
    operations: tuple[PartRow, ...]
    role_rows: tuple[PartRow, ...]
    step_rows: tuple[StepRow, ...]
    heat_map: HeatMap
    unjudged: str
    """Why no rank could be judged; empty if one could."""
    notes: tuple[str, ...] = field(default=())
