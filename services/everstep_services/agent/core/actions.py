"""The actions that an agent's decisions order; the service carries them out."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from everstep.messages import (
    CollectEvidence,
    CopyReplica,
    MeasureNetwork,
    NameExcuse,
    ReleaseImages,
    RunChecks,
    SaveParked,
    StartRanks,
)
from everstep_services.agent.core.exit import RankExit

ReportEvent = Literal[
    "started",
    "first_step",
    "first_collective",
    "start_failed",
    "rank_exited",
    "rank_stalled",
    "rank_recovered",
    "check_failed",
    "check_recovered",
    "check_compared",
    "excused",
    "reached",
    "preempted",
    "stopped",
    "finished",
]
"""What an agent reports to rendezvous, as in `Report.event`."""

LeaveCause = Literal["done", "failed", "stopped", "excluded", "refused", "preempted", "operator"]
"""Why an agent leaves, as in `Leave.cause`."""


@dataclass(frozen=True, slots=True)
class AskToJoin:
    """Ask rendezvous whether we may take part."""


@dataclass(frozen=True, slots=True)
class SendReport:
    """Report something about our part of the round."""

    round: int
    event: ReportEvent
    reason: str
    rank: int | None = None
    exit: RankExit | None = None
    step: int | None = None
    grace_s: float | None = None
    waited_s: float | None = None
    is_stopped: bool = False
    is_fatal: bool = True
    entered_in: Mapping[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    """That of an event that is not the end of a rank."""
    excuse_s: float | None = None
    step_s: float | None = None
    last_progress_age_s: float | None = None
    """Seconds since the ranks last moved, where more precise than what their pages show."""
    fact: str | None = None
    """The id of the fact with the details, unless that is the fact about the end of the rank."""
    injected_by: str = ""
    check: str = ""
    check_state: str = ""
    policy: str = ""
    """For a check: its name, its state, and what its failure leads to."""


@dataclass(frozen=True, slots=True)
class StopRound:
    """Stop every rank; `Agent.stopped` is called when none is left."""

    round: int
    grace_s: float
    evidence_s: float
    incident: str | None
    wait_s: float = 0.0
    """Ranks may first end by themselves for this many seconds: one of them may be the cause."""
    is_done: bool = False
    """Every rank has exited with 0."""
    keeps: tuple[int, ...] = ()
    """These ranks are parked for the next round, if they survive rounds."""
    is_planned: bool = False
    """Nothing has failed: they may finish their step first."""


@dataclass(frozen=True, slots=True)
class EndParked:
    """End the ranks that are parked: no round follows on this node."""

    grace_s: float


@dataclass(frozen=True, slots=True)
class StopWithoutWait:
    """Stop the ranks at once that were allowed to end by themselves."""


@dataclass(frozen=True, slots=True)
class SignalRanks:
    """Send a signal to the ranks themselves, not to processes that they started."""

    number: int
    ranks: tuple[int, ...] | None = None
    """The ranks that get it; None for all."""
    to_handlers: bool = False
    """Send it only to ranks that have a handler for it, so that it ends no rank."""


@dataclass(frozen=True, slots=True)
class PassNotice:
    """Send a notice to the ranks, unless the SDK counts their steps: then `AskRanksToStop`."""

    number: int
    to_handlers: bool = False
    """Send it only to ranks that have a handler for it, so that it ends no rank."""


@dataclass(frozen=True, slots=True)
class AskRanksToStop:
    """Ask the ranks whose steps the SDK counts to save and to exit."""

    after_step: int | None
    """The step after which they stop; None for the first that all ranks of this node can reach."""


@dataclass(frozen=True, slots=True)
class AskRanksToSave:
    """Ask the ranks whose steps the SDK counts to save after this step, and to go on."""

    after_step: int


@dataclass(frozen=True, slots=True)
class ReportProgress:
    """Report the last finished step of the ranks whose steps the SDK counts."""

    round: int


@dataclass(frozen=True, slots=True)
class RecordNotice:
    """Record that this node will be taken away."""

    reason: str
    grace_s: float


@dataclass(frozen=True, slots=True)
class RecordInterrupt:
    """Record that a person ends the ranks of this node by a signal to its agent."""

    name: str


@dataclass(frozen=True, slots=True)
class RecordStopSeen:
    """Record that every rank has seen that it should stop."""

    step: int
    waited_s: float


@dataclass(frozen=True, slots=True)
class RecordSaved:
    """Record that all ranks ended well before the deadline."""

    step: int
    until: float
    """The deadline."""


@dataclass(frozen=True, slots=True)
class RecordMissed:
    """Record that the ranks did not end well before the deadline."""

    reason: str


RecordAction = RecordNotice | RecordInterrupt | RecordStopSeen | RecordSaved | RecordMissed


@dataclass(frozen=True, slots=True)
class ExitAgent:
    """Take leave of rendezvous, unless rendezvous ordered the agent to go, and exit."""

    code: int
    cause: LeaveCause
    reason: str
    is_sent: bool = False
    has_seat: bool = False
    """Rendezvous may still count this node among those of the job, although it sent it away."""
    ends_job: bool = False
    """The job is over, and the code is that of the job; otherwise other nodes may continue."""
    had_work: bool = True
    """Its ranks could have something to save; a spare has no ranks, and others may only start."""


@dataclass(frozen=True, slots=True)
class ShowLine:
    """Show a line to the person who watches."""

    text: str
    is_warning: bool = False


RankAction = StartRanks | SaveParked | StopRound | StopWithoutWait | SignalRanks | EndParked
"""What concerns the processes of ranks."""
SaveAction = PassNotice | AskRanksToStop | AskRanksToSave | ReportProgress | RecordAction
"""What concerns saves and the end of the training."""
AboutStates = CopyReplica | ReleaseImages
"""Orders about states in the memory of this node."""
OrderedAction = NameExcuse | RunChecks | MeasureNetwork | AboutStates | CollectEvidence
"""Orders that leave the ranks as they are, carried out as they come; `StartRanks` is another."""
Action = (
    AskToJoin | SendReport | ExitAgent | ShowLine
    | RankAction | SaveAction | OrderedAction
)  # fmt: skip
