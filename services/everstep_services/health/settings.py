"""The [health] section: when a node is lost, how limits are learned, what makes a node suspect."""

from everstep.settings import Settings

_LEAST_SILENCE_S = 2.5
_LEAST_HAILED_S = 1.5


class LimitSettings(Settings, frozen=True, kw_only=True):
    """How health learns the limits past which a rank counts as stalled."""

    factor: float = 5.0
    """A limit is the longest time of any rank, times this."""
    floor_s: float = 120.0
    """The lowest limit of a section."""
    cap_s: float = 1800.0
    """The highest limit of a section, unless twice the longest time is more."""
    long_floor_s: float = 900.0
    """The lowest limit of checkpoint and evaluation."""
    long_cap_s: float = 4 * 3600.0
    """The highest limit of checkpoint and evaluation, unless twice the longest time is more."""
    first_step_floor_s: float = 3600.0
    """The lowest limit for everything up to the end of a round's first step."""
    first_step_cap_s: float = 7200.0
    """The highest limit for that; it also holds until health has seen a first step."""
    observations: int = 3
    """Health learns from a section once it has ended this often on a node; from checkpoint and
    evaluation once they have ended once."""
    write_every_s: float = 10.0
    """The shortest time between two changes of a job's limits."""

    def __post_init__(self) -> None:
        self._at_least(2, "factor")
        for floor, cap in (
            ("floor_s", "cap_s"),
            ("long_floor_s", "long_cap_s"),
            ("first_step_floor_s", "first_step_cap_s"),
        ):
            if not 0 < getattr(self, floor) <= getattr(self, cap):
                raise ValueError(
                    f"{floor} must be above 0 and at most {cap}, got "
                    f"{getattr(self, floor):g} and {getattr(self, cap):g}"
                )
        self._at_least(1, "observations")
        self._above_zero("write_every_s")


class NodeSettings(Settings, frozen=True, kw_only=True):
    """What makes a node suspect, and how health excludes nodes, if it is allowed to."""

    strikes_limit: int = 3
    """A node with this many strikes is suspect."""
    strikes_window_s: float = 7 * 86400.0
    """How far back strikes (pieces of evidence against a node) count."""
    check_windows: int = 2
    """A node is suspect once a check fails in this many windows without passing in between."""
    check_window_s: float = 300.0
    """The length of such a window."""
    distrust_ratio: float = 0.5
    """A check that fails on this share of the nodes on which it ran counts against no node …"""
    distrust_nodes: int = 3
    """… if it fails on at least this many."""
    exclude_ttl_s: float = 86400.0
    """How long a node is excluded; each time that health excludes it again doubles that."""
    exclude_most: int = 3
    """How often health excludes the same node within four windows of strikes."""
    exclude_by_probes: bool = False
    """Any job may keep nodes out of all jobs: by a probe with the policy `exclude` that fails on
    a node and passes on another, unless `modes.exclude` is `observe` or the brake is on. Jobs set
    the policies of their probes and report the results, so allow this only where you trust the
    scripts of all jobs. Without it, such a node only leaves its job."""
    breaker_ratio: float = 0.05
    """The share of all nodes, but at least one node, that health may exclude, and each policy …"""
    breaker_window_s: float = 3600.0
    """… within this time. Beyond that, it excludes no node until this time has passed again."""
    judge_every_s: float = 10.0
    """How often health judges nodes without new facts about them."""

    def __post_init__(self) -> None:
        self._at_least(1, "strikes_limit check_windows distrust_nodes exclude_most")
        for name in ("distrust_ratio", "breaker_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must be above 0 and at most 1, got {getattr(self, name):g}"
                )
        self._above_zero(
            "strikes_window_s check_window_s exclude_ttl_s breaker_window_s judge_every_s"
        )


class HealthSettings(Settings, frozen=True, kw_only=True):
    """When a silent node is lost. Agents send a beat a second."""

    silence_limit_s: float = 3.0
    """A node is lost after this time without a beat, if nothing explains its silence."""
    hail_after_s: float = 1.1
    """After this time without a beat, health asks the node for one, unless its training moves."""
    hailed_limit_s: float = 1.75
    """The limit of a node that was asked and did not answer, once its training has stopped. It is
    0.55 s less, but at least 1.2 s, if the node's agent was not late before, its warden is silent,
    and nearly all other nodes of the job answer."""
    all_silent_limit_s: float = 15.0
    """The limit while no node of the job is heard: the cause may be the bus, or health itself."""
    all_cut_off_limit_s: float = 600.0
    """The same for a node whose connection was open after its last beat: it is cut off, stopped or
    without power. Its ranks may train on, and there is nobody who could start them again."""
    stopped_limit_s: float = 30.0
    """The limit of a node whose warden still answers other agents of the job while its round goes
    on: the agent is stopped or gets no turn, and its ranks run. 0 turns this off."""
    reconnect_grace_s: float = 10.0
    """After health was cut off from the bus, a node that has not been heard since may be silent
    for this much longer: it may be reconnecting, too. A node whose connection closed, while others
    train on, is lost only after this time. Set it some seconds above [bus] reconnect_jitter_s."""
    moving_limit_most_s: float = 300.0
    """A training counts as moving for one and a half times its longest step after a move, but
    never for longer than this."""
    tick_s: float = 0.0625
    """How often health judges silence."""
    pause_most_s: float = 0.75
    """A longer pause of this process counts as blindness, and so does the time in which it reads
    messages that have waited for longer. After a shorter pause, it first reads the messages that
    were sent meanwhile."""
    forget_after_s: float = 6 * 3600.0
    """Health forgets a node after this time without a beat."""
    limits: LimitSettings = LimitSettings()
    """How health learns limits."""
    nodes: NodeSettings = NodeSettings()
    """What makes a node suspect."""

    def __post_init__(self) -> None:
        if self.silence_limit_s < _LEAST_SILENCE_S:
            raise ValueError(
                f"silence_limit_s must be at least {_LEAST_SILENCE_S:g}, two beats and a half, "
                f"got {self.silence_limit_s:g}"
            )
        is_in_order = 1 < self.hail_after_s < self.hailed_limit_s <= self.silence_limit_s
        if not is_in_order or self.hailed_limit_s < _LEAST_HAILED_S:
            raise ValueError(
                "hail_after_s must be above 1 and below hailed_limit_s, and that at least "
                f"{_LEAST_HAILED_S:g} and at most silence_limit_s, got {self.hail_after_s:g}, "
                f"{self.hailed_limit_s:g} and {self.silence_limit_s:g}"
            )
        self._check_ticks()
        self._not_negative("stopped_limit_s reconnect_grace_s")
        for name, least in (
            ("all_silent_limit_s", "silence_limit_s"),
            ("all_cut_off_limit_s", "all_silent_limit_s"),
            ("moving_limit_most_s", "silence_limit_s"),
        ):
            limit_s, least_s = getattr(self, name), getattr(self, least)
            if limit_s < least_s:
                raise ValueError(f"{name} must be at least {least}, got {limit_s:g} < {least_s:g}")
        if self.forget_after_s <= self.all_cut_off_limit_s + self.reconnect_grace_s:
            raise ValueError(
                f"forget_after_s must be above every limit, got {self.forget_after_s:g}"
            )

    def _check_ticks(self) -> None:
        if not 0 < self.tick_s <= 1:
            raise ValueError(f"tick_s must be above 0 and at most 1, got {self.tick_s:g}")
        if self.pause_most_s < 2 * self.tick_s:
            raise ValueError(
                f"pause_most_s must be at least two ticks, {2 * self.tick_s:g}, "
                f"got {self.pause_most_s:g}"
            )
