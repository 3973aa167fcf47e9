"""The reports of rank 0 about results that cannot be right: events for its agent."""

import math
from typing import TYPE_CHECKING, ClassVar

import msgspec

from trainer_sdk.sdk_log import warn

if TYPE_CHECKING:
    from trainer_sdk.rank_session import Session

_MOST = 1e18
_LISTED = 100


class NumericsEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An event; the agent makes a fact of it. The facts describe the fields."""

    name: ClassVar[str]


class SuspectedEvent(NumericsEvent, frozen=True, kw_only=True, omit_defaults=True):
    """A result of a step cannot be right."""

    name = "suspected"
    case: str
    step: int
    signal: str
    moved_at: int
    rank: int | None = None
    ranks: tuple[int, ...] = ()
    value: float | None = None
    low: float | None = None
    high: float | None = None


class JudgedEvent(NumericsEvent, frozen=True, kw_only=True, omit_defaults=True):
    """The step was run again, or replicas were compared."""

    name = "judged"
    case: str
    step: int
    signal: str
    kind: str
    reason: str
    ranks: tuple[int, ...] = ()
    node: str = ""
    device: str = ""
    group: str = ""
    first: float | None = None
    again: tuple[float | None, ...] = ()
    elsewhere: float | None = None
    elsewhere_by: int | None = None
    samples_from: int | None = None
    samples_to: int | None = None
    moved_from: int | None = None


class ActedEvent(NumericsEvent, frozen=True, kw_only=True, omit_defaults=True):
    """What followed from the judgement."""

    name = "acted"
    case: str
    step: int
    action: str
    outcome: str
    reason: str
    to_step: int | None = None
    lost_steps: int = 0
    samples_from: int | None = None
    samples_to: int | None = None


class ResultCount(msgspec.Struct, frozen=True, kw_only=True):
    """How often a result was the same when its step was run again."""

    name: str
    compared: int
    different: int
    largest: float | None = None


class CountedEvent(NumericsEvent, frozen=True, kw_only=True, omit_defaults=True):
    """How often steps were run again, and gave the same."""

    name = "counted"
    steps: int
    again: int
    results: tuple[ResultCount, ...] = ()


class NumericsReporter:
    """Sends the events of rank 0 to its agent; it never waits and never raises."""

    def __init__(self, rank: int, session: "Session") -> None:
        self._session = session
        self._is_first = not rank
        self._link = None if rank else session._link  # noqa: SLF001 - one package

    def report(self, event: NumericsEvent) -> None:
        """Send an event."""
        if self._link is not None:
            body = msgspec.json.encode(event).decode()
            self._link.send("numerics", f'"event":"{event.name}","body":{body}')

    def warn(self, text: str) -> None:
        """Print a line on rank 0, with or without an agent."""
        if self._is_first:
            warn(f"numerics: {text}")

    def mark(self, name: str, step: int) -> None:
        """Mark a step in the trackers of this rank."""
        self._session._mark(f"numerics/{name}", step)  # noqa: SLF001 - one package


def finite(value: float | None) -> float | None:
    """A value as it is sent: None if it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    return max(-_MOST, min(_MOST, value))


def listed(ranks: "tuple[int, ...] | list[int]") -> tuple[int, ...]:
    """The first ranks, as many as an event has room for."""
    return tuple(ranks[:_LISTED])
