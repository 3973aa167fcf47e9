"""Every question that a service answers on the bus."""

from dataclasses import dataclass

from everstep.messages.base import Message, Name, Question
from everstep.messages.documents.health import LimitsDocument
from everstep.messages.documents.rounds import RoundDocument
from everstep.messages.facts.incidents import VerdictReached
from everstep.messages.questions.answers import Done
from everstep.messages.questions.attribution import (
    CollectivesRead,
    CorrectVerdict,
    Explain,
    ReadEvidence,
    StacksRead,
)
from everstep.messages.questions.catalog import (
    ChangeCheckpoint,
    CheckpointsCollected,
    CheckpointsLocated,
    CollectCheckpoints,
    ListCheckpoints,
    LocateCheckpoint,
    ScanCheckpoints,
)
from everstep.messages.questions.health import (
    ExcludeNode,
    IncludeNode,
    NodeStandings,
    SetControl,
    SetLimit,
    ShowLimits,
    ShowNodes,
)
from everstep.messages.questions.logins import LoginRenewed, RenewLogin
from everstep.messages.questions.rendezvous import (
    DrainNode,
    Join,
    Joined,
    Leave,
    Report,
    Reported,
    RequestChecks,
    RequestCopy,
    RequestEvidence,
    RequestMeasurement,
    RequestRelease,
    RequestSave,
    RestartJob,
    ShowRound,
    StopJob,
)
from everstep.messages.questions.straggler import (
    ClockReading,
    RankScoreTable,
    ReadClock,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    SwitchTable,
    TimingTable,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a service can be asked: the verb, with what, and what comes back."""

    service: Name
    verb: str
    question: type[Question]
    reply: type[Message]


ASKS = (
    Ask("rendezvous", "join", Join, Joined),
    Ask("rendezvous", "leave", Leave, Done),
    Ask("rendezvous", "report", Report, Reported),
    Ask("rendezvous", "show", ShowRound, RoundDocument),
    Ask("rendezvous", "stop", StopJob, Done),
    Ask("rendezvous", "restart", RestartJob, Done),
    Ask("rendezvous", "save", RequestSave, Done),
    Ask("rendezvous", "drain", DrainNode, Done),
    Ask("rendezvous", "evidence", RequestEvidence, Done),
    Ask("rendezvous", "check", RequestChecks, Done),
    Ask("rendezvous", "measure", RequestMeasurement, Done),
    Ask("rendezvous", "copy", RequestCopy, Done),
    Ask("rendezvous", "release", RequestRelease, Done),
    Ask("health", "limits", ShowLimits, LimitsDocument),
    Ask("health", "set_limit", SetLimit, Done),
    Ask("health", "nodes", ShowNodes, NodeStandings),
    Ask("health", "exclude", ExcludeNode, Done),
    Ask("health", "include", IncludeNode, Done),
    Ask("health", "control", SetControl, Done),
    Ask("logins", "renew", RenewLogin, LoginRenewed),
    Ask("straggler", "scores", ShowScores, RankScoreTable),
    Ask("straggler", "timings", ShowTimings, TimingTable),
    Ask("straggler", "switches", ShowSwitches, SwitchTable),
    Ask("straggler", "clock", ReadClock, ClockReading),
    Ask("attribution", "explain", Explain, VerdictReached),
    Ask("attribution", "correct", CorrectVerdict, Done),
    Ask("attribution", "collectives", ReadEvidence, CollectivesRead),
    Ask("attribution", "stacks", ReadEvidence, StacksRead),
    Ask("catalog", "locate", LocateCheckpoint, CheckpointsLocated),
    Ask("catalog", "list", ListCheckpoints, CheckpointsLocated),
    Ask("catalog", "change", ChangeCheckpoint, Done),
    Ask("catalog", "scan", ScanCheckpoints, Done),
    Ask("catalog", "collect", CollectCheckpoints, CheckpointsCollected),
)
"""Every question on the bus."""
