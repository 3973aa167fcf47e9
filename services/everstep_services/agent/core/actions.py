"""What an agent may be told to do by its domain."""

from dataclasses import dataclass

from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    MeasureNetwork,
    NameExcuse,
    ReleaseImages,
    RunChecks,
    StartRanks,
)
from everstep_services.agent.core.exit import RankExit


@dataclass(frozen=True, slots=True)
class AskToJoin:
    """Ask rendezvous whether we may take part."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """Report something about our part of the round."""

    round: int
    event: str
    reason: str
    rank: int | None = None
    exit: RankExit | None = None
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
class StartRound:
    """Start the ranks of this order."""

    order: StartRanks


@dataclass(frozen=True, slots=True)
class StopRound:
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
class StopWithoutWait:
    """Stop ranks now that might have ended by themselves."""


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to ranks themselves, not to what they started."""

    number: int
    ranks: tuple[int, ...] | None = None
    """To these; None for all."""
    to_handlers: bool = False
    """Only to ranks that have a handler for it; it ends no rank."""


@dataclass(frozen=True, slots=True)
class PassNotice:
    """Send a notice to the ranks, unless the SDK counts their steps: then `AskRanksToStop`."""

    number: int
    to_handlers: bool = False
    """Only to ranks that have a handler for it; it ends no rank."""


@dataclass(frozen=True, slots=True)
class AskRanksToStop:
    """Ask the ranks whose steps the SDK counts to save and to end."""

    after_step: int | None
    """After this one; None for the first that all ranks of this node can."""


@dataclass(frozen=True, slots=True)
class AskRanksToSave:
    """Ask them to save after this step, and to go on."""

    after_step: int


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Report how far the ranks are whose steps the SDK counts."""

    round: int


@dataclass(frozen=True, slots=True)
class RecordNotice:
    """Put on record that this node is about to be taken away."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class RecordStopSeen:
    """Put on record that every rank has seen that it should stop."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class RecordSaved:
    """Put on record that all ranks have ended well in the time that they had."""

    step: int
    until: float
    """When it would have been over."""


@dataclass(frozen=True, slots=True)
class RecordMissed:
    """Put on record that they have not."""

    reason: str


RecordAction = RecordNotice | RecordStopSeen | RecordSaved | RecordMissed


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Say goodbye, unless rendezvous sent us, and exit."""

    code: int
    cause: str
    reason: str
    is_sent: bool = False


@dataclass(frozen=True, slots=True)
class ReportExcuse:
    """Report it if a stalled rank may wait for one of ours."""

    order: NameExcuse


@dataclass(frozen=True, slots=True)
class ExamineNode:
    """Examine this node."""

    order: RunChecks


@dataclass(frozen=True, slots=True)
class MeasurePeers:
    """Measure the network with other nodes."""

    order: MeasureNetwork


@dataclass(frozen=True, slots=True)
class CaptureEvidence:
    """Collect evidence of ranks that go on."""

    order: CollectEvidence


AboutStates = CopyReplica | ReleaseImages
"""What is ordered about states in the memory of this node."""


@dataclass(frozen=True, slots=True)
class ChangeReplicas:
    """Copy or release states that this node holds."""

    order: AboutStates


@dataclass(frozen=True, slots=True)
class ShowLine:
    """A line for whoever watches."""

    text: str
    is_warning: bool = False


Action = (
    AskToJoin | SendReport | ExitAgent | ShowLine | RecordAction
    | StartRound | StopRound | StopWithoutWait | SignalRanks
    | PassNotice | AskRanksToStop | AskRanksToSave | ReportProgress
    | ReportExcuse | ExamineNode | MeasurePeers | ChangeReplicas | CaptureEvidence
)  # fmt: skip
