"""What each new fact starts with, for pure decisions: they read no clock and make no ids."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict

from everstep.messages.base import Time


class FactHead(TypedDict):
    """The fields that a fact must have, as keyword arguments of its class."""

    id: str
    job: str
    at: Time
    source: str


class RoundFactHead(FactHead):
    """The head of a fact about a round."""

    round: int


class JobFactHead(FactHead):
    """The head of a fact about a job, which may be in a round."""

    round: int | None


class RankFactHead(RoundFactHead):
    """The head of a fact about a rank."""

    node: str
    slot: int
    rank: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class FactStamp:
    """The time of a decision, and what the facts about it need."""

    wall: Time
    """By the service's own wall clock: the decision outlives the process."""
    new_id: Callable[[], str]
    source: str
    """The service that decides."""

    def head(self, job: str) -> FactHead:
        """The head of a new fact about `job`."""
        return {"id": self.new_id(), "job": job, "at": self.wall, "source": self.source}

    def since_s(self, then: Time) -> float:
        """The seconds from `then` to the decision."""
        return (self.wall - then).total_seconds()
