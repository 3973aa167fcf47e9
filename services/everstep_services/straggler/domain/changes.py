"""The changes of a job's ranks that the domain reports."""

from dataclasses import dataclass, replace

from everstep.messages import FaultInjected, Score
from everstep.slow_rank_causes import SlowRankCause


@dataclass(frozen=True, slots=True)
class SlowRankFound:
    """A rank is slow; reported once."""

    round: int
    rank: int
    node: str
    slot: int
    role: str
    cause: SlowRankCause
    reason: str
    section: str | None
    scores: tuple[Score, ...]
    """The signals that speak against it, the strongest first."""
    lateness_s: float | None
    slower_ratio: float
    """How much longer it needs than the median of its role group: 0.1 for 10 %."""
    lost_s: float
    """What the job loses by it in a step."""
    slowdown_ratio: float | None
    """How much faster the job would be without it: 0.12 for 12 %; None if it is not known."""
    windows: int
    confidence: float
    first_step: int
    last_step: int

    @property
    def is_design(self) -> bool:
        """Whether all ranks of a role have more to do than others, and this one stands for them."""
        return self.cause == "design"


@dataclass(frozen=True, slots=True)
class KeepsUp:
    """A slow rank keeps up again, or is gone; or its role has no more to do; reported once."""

    round: int
    rank: int
    reason: str
    last_step: int | None = None
    """The end of the window that shows it: later findings stay. None if the change
    holds for any window."""
    is_design: bool = False
    """It is about the role that the rank stood for."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What the job lost by a finding in some windows; reported occasionally until it is over."""

    round: int
    rank: int
    is_design: bool
    first_step: int
    last_step: int
    lost_s: float


@dataclass(frozen=True, slots=True)
class StepsShifted:
    """The whole job became slower or faster, and no rank stands out."""

    round: int
    before_s: float
    now_s: float
    step: int
    reason: str
    section: str | None


def with_injection(finding: SlowRankFound, fault: FaultInjected) -> SlowRankFound:
    """The finding, caused by the fault that somebody has made in the rank in this round."""
    if finding.is_design:
        return finding
    reason = f"{fault.by} injected {fault.fault}; {finding.reason}"
    return replace(finding, cause="injected", reason=reason)


Change = SlowRankFound | KeepsUp | Cost | StepsShifted
