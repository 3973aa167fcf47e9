"""Every question that a service answers on the bus."""

from dataclasses import dataclass

from everstep.messages.base import Message, Name, Question
from everstep.messages.documents.health import LimitsDocument
from everstep.messages.documents.rounds import RoundDocument
from everstep.messages.questions.answers import Done
from everstep.messages.questions.attribution import (
    CollectivesRead,
    CorrectVerdict,
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
    HeatMapPart,
    RankScoreTable,
    ReadClock,
    ShowHeatMap,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    SwitchTable,
    TimingTable,
)


@dataclass(frozen=True, slots=True)
class ServiceQuestion:
    """What a service can be asked: the verb, with what, and what comes back."""

    service: Name
    verb: str
    question: type[Question]
    reply: type[Message]


ASKS = (
    ServiceQuestion("rendezvous", "join", Join, Joined),
    ServiceQuestion("rendezvous", "leave", Leave, Done),
    ServiceQuestion("rendezvous", "report", Report, Reported),
    ServiceQuestion("rendezvous", "show", ShowRound, RoundDocument),
    ServiceQuestion("rendezvous", "stop", StopJob, Done),
    ServiceQuestion("rendezvous", "restart", RestartJob, Done),
    ServiceQuestion("rendezvous", "save", RequestSave, Done),
    ServiceQuestion("rendezvous", "drain", DrainNode, Done),
    ServiceQuestion("rendezvous", "evidence", RequestEvidence, Done),
    ServiceQuestion("rendezvous", "check", RequestChecks, Done),
    ServiceQuestion("rendezvous", "measure", RequestMeasurement, Done),
    ServiceQuestion("rendezvous", "copy", RequestCopy, Done),
    ServiceQuestion("rendezvous", "release", RequestRelease, Done),
    ServiceQuestion("health", "limits", ShowLimits, LimitsDocument),
    ServiceQuestion("health", "set_limit", SetLimit, Done),
    ServiceQuestion("health", "nodes", ShowNodes, NodeStandings),
    ServiceQuestion("health", "exclude", ExcludeNode, Done),
    ServiceQuestion("health", "include", IncludeNode, Done),
    ServiceQuestion("health", "control", SetControl, Done),
    ServiceQuestion("logins", "renew", RenewLogin, LoginRenewed),
    ServiceQuestion("straggler", "scores", ShowScores, RankScoreTable),
    ServiceQuestion("straggler", "timings", ShowTimings, TimingTable),
    ServiceQuestion("straggler", "heat_map", ShowHeatMap, HeatMapPart),
    ServiceQuestion("straggler", "switches", ShowSwitches, SwitchTable),
    ServiceQuestion("straggler", "clock", ReadClock, ClockReading),
    ServiceQuestion("attribution", "correct", CorrectVerdict, Done),
    ServiceQuestion("attribution", "collectives", ReadEvidence, CollectivesRead),
    ServiceQuestion("attribution", "stacks", ReadEvidence, StacksRead),
    ServiceQuestion("catalog", "locate", LocateCheckpoint, CheckpointsLocated),
    ServiceQuestion("catalog", "list", ListCheckpoints, CheckpointsLocated),
    ServiceQuestion("catalog", "change", ChangeCheckpoint, Done),
    ServiceQuestion("catalog", "scan", ScanCheckpoints, Done),
    ServiceQuestion("catalog", "collect", CollectCheckpoints, CheckpointsCollected),
)
"""Every question on the bus."""
