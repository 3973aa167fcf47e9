"""The [health] section: when a node is lost, how limits are learned, what makes a node suspect."""

from everstep.settings import Settings

_LEAST_SILENCE_S = 2.5
_LEAST_HAILED_S = 1.5


class LimitSettings(Settings, frozen=True, kw_only=True):
    """How the limits past which ranks have stalled are learned."""

    factor: float = 5.0
    """A limit is so many times the longest that any rank took."""
    floor_s: float = 120.0
    """The lowest limit of a section."""
    cap_s: float = 1800.0
    """The highest, unless twice the longest is more."""
    long_floor_s: float = 900.0
    """The lowest limit of checkpoint and evaluation."""
    long_cap_s: float = 4 * 3600.0
    """The highest limit of checkpoint and evaluation, unless twice the longest is more."""
    first_step_floor_s: float = 3600.0
    """The lowest limit for everything up to the end of a round's first step."""
    first_step_cap_s: float = 7200.0
    """The highest, and the one that holds until a first step was seen."""
    observations: int = 3
    """A section must have ended so often on a node; checkpoint and evaluation once."""
    write_every_s: float = 10.0
    """How often the limits of a job may change."""

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"factor must be at least 2, got {self.factor:g}")
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
        if self.observations < 1 or self.write_every_s <= 0:
            raise ValueError("observations must be at least 1, write_every_s above 0")


class NodeSettings(Settings, frozen=True, kw_only=True):
    """What makes a node suspect, and when health excludes one, if it may."""

    strikes_limit: int = 3
    """A node with so many strikes is suspect."""
    strikes_window_s: float = 7 * 86400.0
    """How far back strikes count."""
    check_windows: int = 2
    """A check must fail in so many windows, without passing in between, to make a node suspect."""
    check_window_s: float = 300.0
    """How long such a window is."""
    distrust_ratio: float = 0.5
    """A check that fails on this share of the nodes on which it ran counts against nobody …"""
    distrust_nodes: int = 3
    """… if they are at least so many."""
    exclude_ttl_s: float = 86400.0
    """How long a node is excluded; twice as long with each time that health excludes it again."""
    exclude_most: int = 3
    """Health excludes the same node so often within four windows of strikes, and then no more."""
    breaker_ratio: float = 0.05
    """The share of all nodes, but at least one, that health may exclude …"""
    breaker_window_s: float = 3600.0
    """… within this time. Beyond it, it excludes none until the time has passed once more."""
    judge_every_s: float = 10.0
    """How often nodes are judged when nothing new is said of them."""

    def __post_init__(self) -> None:
        for name in ("strikes_limit", "check_windows", "distrust_nodes", "exclude_most"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("distrust_ratio", "breaker_ratio"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(
                    f"{name} must be above 0 and at most 1, got {getattr(self, name):g}"
                )
        for name in (
            "strikes_window_s",
            "check_window_s",
            "exclude_ttl_s",
            "breaker_window_s",
            "judge_every_s",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name):g}")


class HealthSettings(Settings, frozen=True, kw_only=True):
    """When a node that is not heard is lost. Agents are heard once a second."""

    silence_limit_s: float = 3.0
    """A node is lost after so long without a beat, if nothing speaks against it."""
    hail_after_s: float = 1.1
    """After so long without a beat, and if nothing speaks for it, a node is asked for one."""
    hailed_limit_s: float = 1.75
    """The limit of a node that was asked and did not answer, once its training stands."""
    all_silent_limit_s: float = 15.0
    """The limit while no node of the job is heard: then the bus or we may be to blame."""
    stopped_limit_s: float = 30.0
    """The limit of a node whose agent is not heard, while its warden still answers other agents of
    the job and its round goes on: the agent is stopped, or has no turn, and the ranks are there. 0
    for no such patience."""
    reconnect_grace_s: float = 10.0
    """After we lost the bus, a node that has not been heard since may be silent for so much
    longer: it may be on its way back, too. And a node whose connection closed, while others train
    on, is lost only after so long. More than [bus] reconnect_jitter_s, by some seconds."""
    moving_limit_most_s: float = 300.0
    """A training that takes long steps is believed to move for one and a half times its
    longest step, but never for longer than this."""
    tick_s: float = 0.0625
    """How often silence is judged."""
    pause_most_s: float = 0.75
    """A pause of ours that was longer is time in which we were blind ourselves, and so is the time
    in which we read what was sent so long ago. After a shorter one we only hear first what was said
    meanwhile."""
    forget_after_s: float = 6 * 3600.0
    """A node that has not been heard for so long is forgotten."""
    inbox_beats: int = 32_768
    """Beats that may wait to be read; beyond it the oldest are dropped, and we are blind."""
    limits: LimitSettings = LimitSettings()
    """How limits are learned."""
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
        if self.all_silent_limit_s < self.silence_limit_s:
            raise ValueError(
                f"all_silent_limit_s must be at least silence_limit_s, got "
                f"{self.all_silent_limit_s:g} < {self.silence_limit_s:g}"
            )
        self._check_ticks()
        if self.stopped_limit_s < 0:
            raise ValueError(f"stopped_limit_s must not be negative, got {self.stopped_limit_s:g}")
        if self.moving_limit_most_s < self.silence_limit_s:
            raise ValueError(
                f"moving_limit_most_s must be at least silence_limit_s, got "
                f"{self.moving_limit_most_s:g} < {self.silence_limit_s:g}"
            )
        if self.forget_after_s <= self.all_silent_limit_s + self.reconnect_grace_s:
            raise ValueError(
                f"forget_after_s must be above every limit, got {self.forget_after_s:g}"
            )
        if self.reconnect_grace_s < 0 or self.inbox_beats < 1:
            raise ValueError("reconnect_grace_s must not be negative, inbox_beats at least 1")

    def _check_ticks(self) -> None:
        if not 0 < self.tick_s <= 1:
            raise ValueError(f"tick_s must be above 0 and at most 1, got {self.tick_s:g}")
        if self.pause_most_s < 2 * self.tick_s:
            raise ValueError(
                f"pause_most_s must be at least two ticks, {2 * self.tick_s:g}, "
                f"got {self.pause_most_s:g}"
            )
