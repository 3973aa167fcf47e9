"""What the verdict on a live job goes by; may change while it runs."""

from dataclasses import dataclass, field

from everstep_services.straggler.domain.verdict import Limits


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits and bounds of the live verdict."""

    limits: Limits = field(default_factory=Limits)
    grace_s: float = 5.0
    """A window closes that long after its first message, even if nodes are missing."""
    shift_ratio: float = 0.1
    """The whole job has become slower or faster when its step changed by more than this."""
    uneven_ratio: float = 0.05
    """A role has too much to do when so much of each step would be saved if roles were even."""
    kept_windows: int = 120
    """So many windows are kept for tables; fewer where a job has very many ranks."""
