"""The [rendezvous] section: the time limits and budgets of its decisions."""

from everstep.settings import Settings


class RendezvousSettings(Settings, frozen=True, kw_only=True):
    """The limits of rendezvous's decisions."""

    join_within_s: float = 600.0
    """How long a round may take to form before the job gives up; a job may set its own limit."""
    last_call_s: float = 1.0
    """How long to wait for a slot's previous holder, beyond the job's stop grace."""
    elastic_wait_s: float = 10.0
    """How long an elastic round waits for more nodes, once it has enough."""
    grow_after_s: float | None = None
    """After this time a running elastic round that could be larger is ended; by default it grows
    only when it ends anyway."""
    crash_evidence_s: float = 0.3
    """How long agents may collect evidence after a crash."""
    stall_evidence_s: float = 5.0
    """How long agents may collect evidence about a stall."""
    stall_excuse_s: float = 0.5
    """How long other agents may take to name a rank that a stalled rank may be waiting for."""
    check_compare_s: float = 10.0
    """How long the other nodes may take to run a check that has failed on one, before its node is
    accused."""
    network_test_within_s: float = 90.0
    """How long a round waits at most for the network test that its job wants before it. A pair that
    has not answered within its part of this time counts as not reached."""
    cause_within_s: float = 0.3
    """How long later reports may replace the first as the cause, and how long ranks may end by
    themselves before they are stopped, while only consequences are known."""
    alike_within_s: float = 3.0
    """How long the other ranks may end by themselves when a rank's program fails before the job
    has ever made a step: if all ranks fail alike, the script cannot start."""
    save_within_s: float = 60.0
    """How long ranks may take to save before an operator's stop or restart."""
    save_agree_s: float = 0.5
    """How long agents may take to report their last step, before a step to save is agreed on."""
    save_lead_s: float = 1.5
    """How long the order to save after that step may take to reach every rank."""
    probe_after_s: float = 0.1
    """An agent that owes an answer is probed after this time."""
    probe_every_s: float = 1.0
    """The time between two probes of the same agent."""
    probe_within_s: float = 0.5
    """How long an agent may take to answer a probe."""
    unheard_after_s: float = 120.0
    """A replica that finds a round running, and has not heard an agent of it for this time, probes
    that agent: it may have died while the control plane was away. Agents must be able to reconnect
    sooner: within 45 s after a loss without a sign, plus `bus.reconnect_jitter_s`."""
    probes_at_once: int = 256
    """The most agents that are probed at once."""
    refill_every_s: float = 1800.0
    """A round that makes steps for this long gives one restart back to the budget."""
    quick_s: float = 60.0
    """A round that fails sooner, without progress, counts as part of a crash loop."""
    steady_after_s: float = 300.0
    """A round whose steps cannot be seen has recovered after it ran for this long."""
    backoff_s: tuple[float, ...] = (0.0, 5.0, 15.0, 45.0, 135.0, 300.0)
    """How long the next round waits after one, two, three … quick failures in a row."""
    say_waiting_after_s: float = 1.0
    """A round that takes longer to form reports what it waits for."""
    replica_factor: int = 2
    """The number of nodes that hold a slot's state in memory, its own node included; 1 for no
    copies. With parts, its own node and one node for each part."""
    replica_jump: int | None = None
    """Slots at this distance keep each other's states; by default slots that share no failure
    domain."""
    replica_parts_needed: int = 1
    """1 for whole copies; otherwise each of the `replica_factor` - 1 other nodes has one part, and
    this number of parts restores a state. Factor 7 with 4 parts survives the loss of any 3 nodes
    with 1.5 times the memory of one copy."""
    gather_s: float = 0.002
    """How long questions are collected before they are decided together; in jobs of more than some
    1 500 nodes longer, in proportion to their document."""
    renew_within_s: float = 5.0
    """How long one write of a job's document may take."""

    def __post_init__(self) -> None:
        self._above_zero(
            "join_within_s network_test_within_s probe_within_s probe_every_s unheard_after_s "
            "refill_every_s"
        )
        self._at_least(1, "probes_at_once replica_factor replica_jump")
        if not 1 <= self.replica_parts_needed <= max(self.replica_factor - 1, 1):
            raise ValueError(
                f"replica_parts_needed must be from 1 to replica_factor - 1, got "
                f"{self.replica_parts_needed} with a replica_factor of {self.replica_factor}"
            )
        if not self.backoff_s or list(self.backoff_s) != sorted(self.backoff_s):
            raise ValueError(f"backoff_s must not shrink, got {list(self.backoff_s)}")
