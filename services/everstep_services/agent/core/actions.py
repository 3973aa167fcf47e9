"""What an agent may be told to do by its domain."""

from dataclasses import dataclass

from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    DropReplica,
    MeasureNetwork,
    NameExcuse,
    ReleaseImages,
    RunChecks,
    StartRanks,
)
from everstep_services.agent.core.exit import Exit


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
    waited_s: float | None = None
    entered: int | None = None
    excuse_s: float | None = None
    step_s: float | None = None
    age_s: float | None = None
    """Since the ranks last moved, where that is known more precisely than by their pages."""
    fact: str | None = None
    """The id of the fact that says more, where it is not the end of the rank."""


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
    wait_s: float = 0.0
    """They may end by themselves for so long: one of them may be the cause."""
    is_done: bool = False
    """Every rank has exited with 0."""


@dataclass(frozen=True, slots=True)
class Hurry:
    """Stop ranks now that might have ended by themselves."""


@dataclass(frozen=True, slots=True)
class Forward:
    """Send a signal to ranks themselves, not to what they started."""

    number: int
    ranks: tuple[int, ...] | None = None
    """To these; None for all."""
    to_handlers: bool = False
    """Only to ranks that have a handler for it; it ends no rank."""


@dataclass(frozen=True, slots=True)
class PassOn:
    """Send a notice to ranks; not where the SDK counts steps: those are asked by `AskToStop`."""

    number: int
    to_handlers: bool = False
    """Only to ranks that have a handler for it; it ends no rank."""


@dataclass(frozen=True, slots=True)
class AskToStop:
    """Ask the ranks whose steps the SDK counts to save and to end."""

    after_step: int | None
    """After this one; None for the first that all ranks of this node can."""


@dataclass(frozen=True, slots=True)
class AskToSave:
    """Ask them to save after this step, and to go on."""

    after_step: int


@dataclass(frozen=True, slots=True)
class Reach:
    """Report how far the ranks are whose steps the SDK counts."""

    round: int


@dataclass(frozen=True, slots=True)
class Noticed:
    """Put on record that this node is about to be taken away."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """Put on record that every rank has seen that it should stop."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """Put on record that all ranks have ended well in the time that they had."""

    step: int
    until: float
    """When it would have been over."""


@dataclass(frozen=True, slots=True)
class Missed:
    """Put on record that they have not."""

    reason: str


OnRecord = Noticed | Acknowledged | Saved | Missed


@dataclass(frozen=True, slots=True)
class Exiting:
    """Say goodbye, unless rendezvous sent us, and exit."""

    code: int
    cause: str
    reason: str
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class Excuse:
    """Report it if a stalled rank may wait for one of ours."""

    order: NameExcuse


@dataclass(frozen=True, slots=True)
class Check:
    """Examine this node."""

    order: RunChecks


@dataclass(frozen=True, slots=True)
class Measure:
    """Measure the network with other nodes."""

    order: MeasureNetwork


@dataclass(frozen=True, slots=True)
class Capture:
    """Collect evidence of ranks that go on."""

    order: CollectEvidence


AboutStates = CopyReplica | DropReplica | ReleaseImages
"""What is ordered about states in the memory of this node."""


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy, drop or release states that are here."""

    order: AboutStates


@dataclass(frozen=True, slots=True)
class Say:
    """A line for whoever watches."""

    text: str
    is_warning: bool = False


Act = (
    Join | Tell | Start | Stop | Hurry | Forward | Excuse | Check | Measure | Replicate | Capture
    | Exiting | Say | PassOn | AskToStop | AskToSave | Reach | OnRecord
)  # fmt: skip
