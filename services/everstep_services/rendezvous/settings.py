"""The [rendezvous] section: how patient it is, and when it stops trying."""

from everstep.settings import Settings


class RendezvousSettings(Settings, frozen=True, kw_only=True):
    """Every limit that a decision of rendezvous can pass."""

    join_within_s: float = 600.0
    """How long a round may take to form before the job gives up, unless the job says otherwise."""
    last_call_s: float = 1.0
    """Beyond the job's stop grace, how long a previous holder of a slot is waited for."""
    elastic_wait_s: float = 10.0
    """How long an elastic round waits for more nodes, once it has enough."""
    grow_after_s: float | None = None
    """A running elastic round that could be larger is ended after this time; by default it grows
    when it ends anyway."""
    crash_evidence_s: float = 0.3
    """How long agents may collect evidence after a crash."""
    stall_evidence_s: float = 5.0
    """How long agents may collect evidence about a stall."""
    stall_excuse_s: float = 0.5
    """How long other agents may take to name a rank that a stalled one may wait for."""
    cause_within_s: float = 0.3
    """How long the reports that follow the first may explain it better."""
    save_within_s: float = 60.0
    """How long ranks may take to save before an operator's stop or restart."""
    save_agree_s: float = 0.5
    """How long agents may take to say how far their ranks are, before a step is agreed on."""
    save_lead_s: float = 1.5
    """How long the order to save after that step may take to reach every rank."""
    probe_after_s: float = 0.1
    """An agent that owes an answer is asked for a sign of life after this time."""
    probe_every_s: float = 1.0
    """And again so often."""
    probe_within_s: float = 0.5
    """How long it may take to give that sign."""
    probes_at_once: int = 256
    """So many agents are asked at once."""
    refill_every_s: float = 1800.0
    """A round that makes steps for so long gives one restart back to the budget."""
    quick_s: float = 60.0
    """A round that fails sooner, without progress, counts as part of a crash loop."""
    steady_after_s: float = 300.0
    """A round without any step that could be seen has recovered after it ran for so long."""
    backoff_s: tuple[float, ...] = (0.0, 5.0, 15.0, 45.0, 135.0, 300.0)
    """How long the next round waits after that many quick failures in a row."""
    say_waiting_after_s: float = 1.0
    """A round that takes longer to form says what it waits for."""
    gather_s: float = 0.002
    """How long questions gather before they are decided together."""
    renew_within_s: float = 5.0
    """How long one write of a job's document may take."""

    def __post_init__(self) -> None:
        for name in ("join_within_s", "probe_within_s", "probe_every_s", "refill_every_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")
        if self.probes_at_once < 1:
            raise ValueError(f"probes_at_once must be at least 1, got {self.probes_at_once}")
        if not self.backoff_s or list(self.backoff_s) != sorted(self.backoff_s):
            raise ValueError(f"backoff_s must not shrink, got {list(self.backoff_s)}")
