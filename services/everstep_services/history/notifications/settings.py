"""The [notify] section: whom to tell, of what, and how soon. Off until a target is set."""

from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from everstep.settings import Settings
from everstep_services.history.notifications.notices import EVENTS, Event

Target = Literal["webhook", "slack", "pagerduty", "alertmanager"]
TARGETS: tuple[Target, ...] = ("webhook", "slack", "pagerduty", "alertmanager")


def _checked_url(name: str, url: str) -> None:
    """Refuse a text that is not an address, or has a password, which belongs into a file."""
    if not url:
        return
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError(f"{name} must be http://HOST… or https://HOST…")
    if "@" in parts.netloc:
        raise ValueError(f"{name} must not contain a password; see the guide for files with one")


class WebhookSettings(Settings, frozen=True, kw_only=True):
    """JSON to an address of yours, signed if there is a secret."""

    url: str = ""
    """Where to POST: `https://example.org/everstep`. Empty for no webhook."""
    url_file: Path | None = None
    """A file with the address instead, if the address itself is a secret."""
    secret_file: Path | None = None
    """A file with the secret that signs each message; without it there is no signature."""
    format: Literal["notice", "health_events"] = "notice"
    """The form of messages. `notice` has all details; `health_events` has one event for each node,
    in the field names of NVSentinel.
    """

    def __post_init__(self) -> None:
        _checked_url("url", self.url)
        if self.url and self.url_file is not None:
            raise ValueError("url and url_file are both set: keep one of them")
        if self.secret_file is not None and not self.is_on:
            raise ValueError("secret_file needs url or url_file: where to send to")

    @property
    def is_on(self) -> bool:
        """There is such a target."""
        return bool(self.url) or self.url_file is not None


class SlackSettings(Settings, frozen=True, kw_only=True):
    """An incoming webhook of Slack, Mattermost or Rocket.Chat."""

    url_file: Path | None = None
    """A file with the address of the incoming webhook, which is a secret."""


class PagerDutySettings(Settings, frozen=True, kw_only=True):
    """PagerDuty, by version 2 of its Events API."""

    routing_key_file: Path | None = None
    """A file with the integration key of the service that must be alerted."""
    url: str = "https://events.pagerduty.com/v2/enqueue"
    """Another address for accounts in the EU: `https://events.eu.pagerduty.com/v2/enqueue`."""

    def __post_init__(self) -> None:
        _checked_url("url", self.url)


class AlertmanagerSettings(Settings, frozen=True, kw_only=True):
    """Prometheus' Alertmanager, by version 2 of its API."""

    url: str = ""
    """The address of Alertmanager, without the path of its API: `http://alertmanager:9093`. Empty
    for none.
    """
    authorization_file: Path | None = None
    """A file with the value of the `Authorization` header, where a proxy wants one:
    `Bearer …` or `Basic …`."""
    refresh_s: float = 300.0
    """How often alerts that last are sent again: Alertmanager forgets them at a restart."""

    def __post_init__(self) -> None:
        _checked_url("url", self.url)
        if not 10 <= self.refresh_s <= 1800:
            raise ValueError(f"refresh_s must be from 10 to 1800, got {self.refresh_s:g}")


class DeadManSettings(Settings, frozen=True, kw_only=True):
    """A ping to a service that raises the alarm when pings stop coming."""

    url_file: Path | None = None
    """A file with the address to ping: anybody who knows it could keep the alarm silent."""
    every_s: float = 60.0
    """How often it is pinged, as long as messages can be sent and the bus is connected."""
    method: Literal["GET", "POST"] = "GET"
    """The HTTP method of the ping."""

    def __post_init__(self) -> None:
        self._at_least(1, "every_s")


class NotifySettings(Settings, frozen=True, kw_only=True):
    """Messages to people when something needs them. Any of the targets may be set at once."""

    events: tuple[Event, ...] = EVENTS
    """The events that send a message: `incident`, `job_failed`, `job_stopped` (by Everstep, not by
    a person), `slow_rank`, `node_drained`, `node_excluded`, `breaker_open`.
    """
    dashboard_url: str = ""
    """The address of the dashboard, for links in messages; without it they have none."""
    settle_s: float = 5.0
    """How long a notice is held, so that its first message has the verdict."""
    cooldown_s: float = 300.0
    """Incidents of the same job and cause within this time are counted, and reported in one
    message.
    """
    slow_rank_after_s: float = 300.0
    """A slow rank is reported if it lasts for this time."""
    stale_after_s: float = 3600.0
    """An event that arrives later than this, as after an outage, sends no message."""
    within_s: float = 10.0
    """How long a target may take to answer."""
    retry_first_s: float = 1.0
    """The first wait after a target failed; it doubles."""
    retry_most_s: float = 60.0
    """The longest wait between two attempts, unless the target asks for more."""
    retry_for_s: float = 3600.0
    """A message that cannot be sent for this time is given up."""
    webhook: WebhookSettings = WebhookSettings()
    """JSON to an address of yours."""
    slack: SlackSettings = SlackSettings()
    """An incoming webhook of Slack, or of what understands the same."""
    pagerduty: PagerDutySettings = PagerDutySettings()
    """PagerDuty's Events API."""
    alertmanager: AlertmanagerSettings = AlertmanagerSettings()
    """Prometheus' Alertmanager."""
    dead_man: DeadManSettings = DeadManSettings()
    """A ping that stops when messages cannot be sent."""

    def __post_init__(self) -> None:
        _checked_url("dashboard_url", self.dashboard_url)
        self._above_zero("within_s retry_first_s retry_most_s retry_for_s stale_after_s")
        self._not_negative("settle_s cooldown_s slow_rank_after_s")
        if self.within_s > 20:
            raise ValueError(f"within_s must be at most 20, got {self.within_s:g}")
        if self.retry_most_s < self.retry_first_s:
            raise ValueError(
                f"need retry_first_s <= retry_most_s, got {self.retry_first_s:g} and "
                f"{self.retry_most_s:g}"
            )

    @property
    def targets(self) -> tuple[Target, ...]:
        """The targets that are set."""
        is_on: dict[Target, bool] = {
            "webhook": self.webhook.is_on,
            "slack": self.slack.url_file is not None,
            "pagerduty": self.pagerduty.routing_key_file is not None,
            "alertmanager": bool(self.alertmanager.url),
        }
        return tuple(target for target in TARGETS if is_on[target])

    @property
    def is_on(self) -> bool:
        """Whether there is any target, or an address to ping."""
        return bool(self.targets) or self.dead_man.url_file is not None
