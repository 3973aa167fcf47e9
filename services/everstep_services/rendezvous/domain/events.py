"""What rendezvous hears of, and what it wants done about it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
    StopJob,
)
from everstep.messages.base import Time


@dataclass(frozen=True, slots=True)
class Now:
    """When it is, and what only the shell can make."""

    s: float
    """Our own monotonic seconds: the only time that decides anything."""
    wall: Time
    """For people."""
    new_id: Callable[[], str]


@dataclass(frozen=True, slots=True)
class Probed:
    """An agent was asked for a sign of life."""

    node: str
    instance: str
    is_there: bool
    """It gave one. False: the server knows that nobody listens there any more."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Join
    | Leave
    | Report
    | Probed
    | NodeLost
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
    """What people and health say about a job from outside: switches, and nodes not to rely on."""

    is_braked: bool = False
    modes: Mapping[str, str] = field(default_factory=dict)
    exclusions: tuple[Exclusion, ...] = ()
    suspects: Mapping[str, str] = field(default_factory=dict)
    """By node, what speaks against it: too much for a slot that another can have."""

    def enforces(self, actuator: str, *, otherwise: bool) -> bool:
        """Whether an actuator acts, or only says what it would do."""
        if self.is_braked:
            return False
        mode = self.modes.get(actuator)
        return otherwise if mode not in {"enforce", "observe"} else mode == "enforce"

    def exclusion(self, node: str, now: Time) -> Exclusion | None:
        """Why this node may not join, if it may not."""
        for exclusion in self.exclusions:
            if exclusion.node == node and (exclusion.until is None or exclusion.until > now):
                return exclusion
        return None

    def suspicion(self, node: str) -> str | None:
        """Why a spare is to have this node's slot, if it is."""
        return self.suspects.get(node) if self.enforces("replace", otherwise=True) else None


@dataclass(frozen=True, slots=True)
class Send:
    """An order, to one agent, or to all of the job."""

    node: str | None
    instance: str
    """That very agent, whoever else has the same node id; empty for all."""
    order: Order


@dataclass(frozen=True, slots=True)
class LivenessProbe:
    """Find out whether an agent is there; its order goes along, in case it was lost."""

    node: str
    instance: str
    """That very agent, whoever else has the same node id."""
    order: Order


@dataclass(slots=True)
class BatchOutcome:
    """What came of a batch of events."""

    replies: list[Message | None]
    """One for each event; None where nobody waits for one."""
    sends: list[Send]
    probes: list[LivenessProbe]
    wake_at: float | None
    """When `Tick` should come."""
    is_changed: bool
    """There is something to write down before any of it may be done."""
