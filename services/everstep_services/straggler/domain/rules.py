"""The rules of the verdict on a live job; they may change while it runs."""

from dataclasses import dataclass, field

from everstep_services.straggler.domain.verdict import SlownessLimits


@dataclass(frozen=True, slots=True)
class LiveRules:
    """Limits and bounds of the live verdict."""

    limits: SlownessLimits = field(default_factory=SlownessLimits)
    grace_s: float = 5.0
    """A window closes that long after its first message, even if nodes are missing."""
    shift_ratio: float = 0.1
    """The whole job has become slower or faster when its step changed by more than this."""
    uneven_ratio: float = 0.05
    """A role is uneven if even roles would save this share of each step."""
    kept_windows: int = 120
    """The number of windows kept for tables; fewer if a job has very many ranks."""
