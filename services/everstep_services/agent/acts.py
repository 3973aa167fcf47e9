"""What an agent may be told to do by its domain."""

from dataclasses import dataclass

from everstep.messages import StartRanks
from everstep_services.agent.failures import Exit


@dataclass(frozen=True, slots=True)
class Join:
    """Ask rendezvous whether we may take part."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Report something about our part of the round."""

    round: int
    event: str
    reason: str
    rank: int | None = None
    exit: Exit | None = None
    step: int | None = None
    grace_s: float | None = None


@dataclass(frozen=True, slots=True)
class Start:
    """Start the ranks of this order."""

    order: StartRanks


@dataclass(frozen=True, slots=True)
class Stop:
    """Stop every rank; answer with `stopped`."""

    round: int
    grace_s: float
    evidence_s: float
    incident: str | None


@dataclass(frozen=True, slots=True)
class Forward:
    """Send a signal to ranks themselves, not to what they started."""

    number: int
    ranks: tuple[int, ...] | None = None
    """To these; None for all."""


@dataclass(frozen=True, slots=True)
class Exiting:
    """Say goodbye, unless rendezvous sent us, and exit."""

    code: int
    cause: str
    reason: str
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class Say:
    """A line for whoever watches."""

    text: str
    is_warning: bool = False


Act = Join | Tell | Start | Stop | Forward | Exiting | Say
