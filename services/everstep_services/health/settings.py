"""The [health] section: how long a node may be silent, and what counts against its loss."""

from everstep.settings import Settings

_LEAST_SILENCE_S = 2.5


class HealthSettings(Settings, frozen=True, kw_only=True):
    """When a node that is not heard is lost. Agents are heard once a second."""

    silence_limit_s: float = 3.0
    """A node is lost after so long without a beat, if nothing speaks against it."""
    all_silent_limit_s: float = 15.0
    """The limit while no node of the job is heard: then the bus or we may be to blame."""
    reconnect_grace_s: float = 10.0
    """After we lost the bus, a node that has not been heard since may be silent for so much
    longer: it may be on its way back, too."""
    moving_limit_most_s: float = 300.0
    """A training that takes long steps is believed to move for one and a half times its
    longest step, but never for longer than this."""
    tick_s: float = 0.25
    """How often silence is judged. A tick that is late by more than that is time in which we
    were blind ourselves."""
    forget_after_s: float = 6 * 3600.0
    """A node that has not been heard for so long is forgotten."""
    inbox_beats: int = 32_768
    """Beats that may wait to be read; beyond it the oldest are dropped, and we are blind."""

    def __post_init__(self) -> None:
        if self.silence_limit_s < _LEAST_SILENCE_S:
            raise ValueError(
                f"silence_limit_s must be at least {_LEAST_SILENCE_S:g}, two beats and a half, "
                f"got {self.silence_limit_s:g}"
            )
        if self.all_silent_limit_s < self.silence_limit_s:
            raise ValueError(
                f"all_silent_limit_s must be at least silence_limit_s, got "
                f"{self.all_silent_limit_s:g} < {self.silence_limit_s:g}"
            )
        if not 0 < self.tick_s <= 1:
            raise ValueError(f"tick_s must be above 0 and at most 1, got {self.tick_s:g}")
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
