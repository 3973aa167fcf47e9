"""The bodies of webhooks, and which notices each shape makes. Pure.

The shapes of NVSentinel and of Azure's Scheduled Events are made from their documentation, and were
never tried against the real systems.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Annotated, Final, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from everstep.ids import id_from
from everstep.store.maintenance import MaintenanceAction
from everstep_services.history.api.http.parameters import TEXT, RequestModel

NODES_MOST: Final = 256
_ID = Field(min_length=1, max_length=128, pattern=TEXT)
_NODE_NAME = Annotated[str, Field(min_length=1, max_length=253, pattern=TEXT)]
_REASON_MOST = 500


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a message asks for, in our words."""

    id: str
    nodes: tuple[str, ...]
    """As the sender calls them."""
    is_cancelled: bool
    action: MaintenanceAction = "drain"
    starts_at: datetime | None = None
    """None for now."""
    ends_at: datetime | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reading:
    """The announcements in a message, and why its other parts are none."""

    announcements: tuple[Announcement, ...]
    ignored: tuple[str, ...] = ()


class MaintenanceWanted(RequestModel):
    """Our own shape: maintenance of nodes, or its cancellation."""

    id: str = Field(min_length=1, max_length=128, pattern=TEXT, examples=["CHG-4711"])
    """Names the notice: sent again, it is the same notice, and its times may change until it is
    due."""
    action: Literal["drain", "exclude", "cancel"]
    """`drain` takes the nodes out of their jobs after a save, and keeps them out until `ends_at`;
    `exclude` lets them join nothing, and does not touch a round; `cancel` ends a notice that
    waits."""
    nodes: list[_NODE_NAME] = Field([], max_length=NODES_MOST, examples=[["node-07"]])
    """Ids of nodes, or aliases that are set in `[api.webhooks]`. Of `cancel`: none."""
    starts_at: AwareDatetime | None = None
    """When to act; null, or a moment that has passed, for at once."""
    ends_at: AwareDatetime | None = None
    """Until when the nodes stay excluded; null as health is set to."""
    reason: str = Field("maintenance", min_length=1, max_length=_REASON_MOST, pattern=TEXT)
    """Why."""

    def reading(self) -> Reading:
        """As announcements. A `ValueError` says what is missing."""
        if self.action == "cancel":
            return Reading((Announcement(self.id, (), is_cancelled=True),))
        if not self.nodes:
            raise ValueError(f"nodes: name at least one node to {self.action}")
        if self.ends_at is not None and self.ends_at <= (self.starts_at or _FIRST):
            raise ValueError("ends_at must be later than starts_at")
        return Reading(
            (
                Announcement(
                    self.id, tuple(dict.fromkeys(self.nodes)), is_cancelled=False,
                    action=self.action, starts_at=self.starts_at, ends_at=self.ends_at,
                    reason=self.reason,
                ),
            )
        )  # fmt: skip


_FIRST = datetime(1970, 1, 1, tzinfo=UTC)

_REMEDIES: Final = frozenset(
    {"COMPONENT_RESET", "CONTACT_SUPPORT", "RUN_FIELDDIAG", "RUN_DCGMEUD", "RESTART_VM",
     "RESTART_BM", "REPLACE_VM"}
)  # fmt: skip
"""Actions of NVSentinel that take a node away from its job."""


class HealthEvent(BaseModel):
    """A health event as NVSentinel describes one, in JSON. Other fields are not read."""

    model_config = ConfigDict(extra="ignore")

    nodeName: _NODE_NAME  # noqa: N815  the names of its fields
    agent: str = Field("", max_length=256, pattern=TEXT)
    componentClass: str = Field("", max_length=256, pattern=TEXT)  # noqa: N815
    checkName: str = Field("", max_length=256, pattern=TEXT)  # noqa: N815
    isFatal: bool = False  # noqa: N815
    isHealthy: bool = False  # noqa: N815
    message: str = Field("", max_length=4096)
    recommendedAction: str = Field("UNKNOWN", max_length=64, pattern=TEXT)  # noqa: N815
    errorCode: list[Annotated[str, Field(max_length=64)]] = Field([], max_length=64)  # noqa: N815
    generatedTimestamp: str = Field("", max_length=64, pattern=TEXT)  # noqa: N815

    @property
    def id(self) -> str:
        """The same for the same event, however often it is sent."""
        codes = ",".join(self.errorCode)
        return id_from(self.nodeName, self.agent, self.checkName, codes, self.generatedTimestamp)

    def reading(self) -> Reading:
        """A drain if it is fatal and a repair is recommended."""
        subject = f"{self.checkName or 'a check'} of {self.nodeName}"
        if self.isHealthy:
            text = f"{subject}: healthy; a node stays out until its time is over or it is included"
            return Reading((), (text,))
        if not self.isFatal or self.recommendedAction not in _REMEDIES:
            fatal = "fatal" if self.isFatal else "not fatal"
            return Reading((), (f"{subject}: {fatal}, {self.recommendedAction}: no drain",))
        codes = f" ({', '.join(self.errorCode)})" if self.errorCode else ""
        reason = f"{self.checkName}{codes}, {self.recommendedAction}: {self.message}"
        return Reading(
            (Announcement(self.id, (self.nodeName,), is_cancelled=False, reason=_clean(reason)),)
        )


class HealthEvents(BaseModel):
    """Health events as NVSentinel describes them."""

    model_config = ConfigDict(extra="ignore")

    events: list[HealthEvent] = Field(min_length=1, max_length=NODES_MOST)

    def reading(self) -> Reading:
        """The announcements of all events."""
        return _joined(event.reading() for event in self.events)


class ScheduledEvent(BaseModel):
    """An event of Azure's Scheduled Events. Other fields are not read."""

    model_config = ConfigDict(extra="ignore")

    EventId: str = _ID
    EventType: str = Field(max_length=64, pattern=TEXT)
    EventStatus: str = Field("Scheduled", max_length=64, pattern=TEXT)
    Resources: list[_NODE_NAME] = Field([], max_length=NODES_MOST)
    NotBefore: str = Field("", max_length=64, pattern=TEXT, description="RFC 1123, or empty.")
    Description: str = Field("", max_length=4096)

    def reading(self) -> Reading:
        """A drain before the machine is taken away."""
        if self.EventStatus in {"Completed", "Canceled", "Cancelled"}:
            return Reading((Announcement(self.EventId, (), is_cancelled=True),))
        if self.EventType not in {"Reboot", "Redeploy", "Preempt", "Terminate"}:
            return Reading((), (f"{self.EventId}: {self.EventType}: no drain",))
        if not self.Resources:
            return Reading((), (f"{self.EventId}: it names no resources",))
        starts_at = None
        if self.NotBefore:
            starts_at = parsedate_to_datetime(self.NotBefore)
            starts_at = starts_at if starts_at.tzinfo else starts_at.replace(tzinfo=UTC)
        reason = _clean(f"{self.EventType}: {self.Description}")
        return Reading(
            (
                Announcement(
                    self.EventId, tuple(dict.fromkeys(self.Resources)), is_cancelled=False,
                    starts_at=starts_at, reason=reason,
                ),
            )
        )  # fmt: skip


class ScheduledEvents(BaseModel):
    """The document of Azure's Scheduled Events, as a relay on a node or outside sends it on."""

    model_config = ConfigDict(extra="ignore")

    Events: list[ScheduledEvent] = Field(max_length=NODES_MOST)

    def reading(self) -> Reading:
        """The announcements of all events."""
        return _joined(event.reading() for event in self.Events)


def _joined(readings: Iterable[Reading]) -> Reading:
    whole = list(readings)
    return Reading(
        tuple(item for reading in whole for item in reading.announcements),
        tuple(text for reading in whole for text in reading.ignored),
    )


def _clean(text: str) -> str:
    """One line without control characters, as reasons on record have it."""
    words = "".join(c if c.isprintable() else " " for c in text).split()
    return " ".join(words)[:_REASON_MOST] or "maintenance"
