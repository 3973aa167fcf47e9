"""The [log] and [observe] sections: what is logged, and where a process serves its health."""

from typing import Literal

from everstep.settings import Settings


class LogSettings(Settings, frozen=True, kw_only=True):
    """Which lines are logged, and in which format."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least important level that is logged."""
    format: Literal["auto", "console", "json"] = "auto"
    """`json` has one object a line; `auto` is `console` on a terminal and `json` elsewhere."""


class ObserveSettings(Settings, frozen=True, kw_only=True):
    """Where a process answers `/healthz`, `/livez` and `/metrics`."""

    host: str = "127.0.0.1"
    """The address to listen on. Requests need no token: keep it inside your network."""
    port: int = 9464
    """The port to listen on; 0 takes any free one."""
    check_within_s: float = 2.0
    """How long one check may take before it counts as failed."""
    traces_url: str = ""
    """Where spans of requests and questions are sent: the address of an OpenTelemetry collector for
    OTLP over HTTP, as `http://collector:4318/v1/traces`. Empty sends none."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be from 0 to 65535, got {self.port}")
        if self.traces_url and not self.traces_url.startswith(("http://", "https://")):
            raise ValueError(f"traces_url must begin with http:// or https://: {self.traces_url!r}")
        self._above_zero("check_within_s")
