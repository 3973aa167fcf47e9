"""The events that rendezvous decides about, and the outcome of a batch of them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from everstep.messages import (
    DrainNode,
    Exclusion,
    Join,
    Leave,
    Message,
    NodeLost,
    Order,
    Report,
    RequestChecks,
    RequestCopy,
    RequestEvidence,
    RequestMeasurement,
    RequestRelease,
    RequestSave,
    RestartJob,
    StallLocated,
    StopJob,
)
from everstep.messages.base import Time


@dataclass(frozen=True, slots=True)
class Now:
    """The time, and values that only the shell can make."""

    s: float
    """Our own monotonic seconds: the only clock that decisions use."""
    wall: Time
    """For people."""
    new_id: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Probed:
    """The result of a liveness probe of an agent."""

    node: str
    instance: str
    is_there: bool
    """Whether it answered. False: the server reports that nobody subscribes there any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Join
    | Leave
    | Report
    | Probed
    | NodeLost
    | StallLocated
    | StopJob
    | RestartJob
    | DrainNode
    | RequestSave
    | RequestEvidence
    | RequestChecks
    | RequestMeasurement
    | RequestCopy
    | RequestRelease
    | Tick
)


@dataclass(frozen=True, slots=True)
class JobControl:
    """Switches of people, and nodes that health excludes or suspects."""

    is_braked: bool = False
    modes: Mapping[str, str] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()
    suspects: Mapping[str, str] = field(default_factory=dict)
    """By node, why health suspects it: it gets a slot only if no other node can have it."""

    def enforces(self, actuator: str, *, otherwise: bool) -> bool:
        """Whether an actuator acts, or only records what it would do."""
        if self.is_braked:
            return False
        mode = self.modes.get(actuator)
        return otherwise if mode not in {"enforce", "observe"} else mode == "enforce"

    def exclusion(self, node: str, now: Time) -> Exclusion | None:
        """Return why this node may not join; None if it may."""
        for exclusion in self.exclusions:
            if exclusion.node == node and (exclusion.until is None or exclusion.until > now):
                return exclusion
        return None

    @property
    def acted_suspects(self) -> Mapping[str, str]:
        """The suspects whose slots spares should get; none where that is only observed."""
        return self.suspects if self.enforces("replace", otherwise=True) else {}

    def suspicion(self, node: str) -> str | None:
        """Return why a spare should get this node's slot; None if it should not."""
        return self.acted_suspects.get(node)


class Send(NamedTuple):
    """An order to one agent or to all agents of the job."""

    node: str | None
    instance: str
    """The agent's instance, because two agents may have one node id; empty for all."""
    order: Order


@dataclass(frozen=True, slots=True)
class LivenessProbe:
    """A probe of an agent; it carries the agent's order, in case that was lost."""

    node: str
    instance: str
    """The agent's instance, because two agents may have one node id."""
    order: Order


@dataclass(slots=True)
class BatchOutcome:
    """The outcome of a batch of events."""

    replies: list[Message | None]
    """One reply for each event; None where nobody waits for one."""
    sends: list[Send]
    probes: list[LivenessProbe]
    wake_at: float | None
    """When the next `Tick` is due."""
    is_changed: bool
    """Whether the document must be written before any of it may be carried out."""
