"""What services may be asked, and what they answer."""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.messages.base import Int, Message, Part, Question, Reply, Time
from everstep.messages.checkpoints import RejectedStep
from everstep.messages.documents import Exclusion, LimitsDocument, RoundDocument
from everstep.messages.health import CheckResult, SectionLimit
from everstep.messages.incidents import VerdictReached
from everstep.messages.jobs import JobSpec
from everstep.messages.orders import Peer, StandBy, StartRanks, StopRanks
from everstep.messages.stragglers import Score


class Done(Reply, frozen=True, kw_only=True, tag="done.v1"):
    """It was done, or was done already. Asking again is harmless."""

    text: str = ""
    """What happened, for the person who asked."""


class Join(Question, frozen=True, kw_only=True, tag="join.v1"):
    """May I take part? An agent asks at its start, after each round, and until it may."""

    node: str
    """The node."""
    instance: str
    """The agent's own id, another after each start: tells a second node with the same name."""
    spec: JobSpec
    """What it believes the job to be."""
    allocation: str
    """Its allocation."""
    address: str
    """Where other nodes reach it."""
    ranks: Int
    """How many processes it can run."""
    scheduler: str = "none"
    """As in `allocation_started`."""
    scheduler_job: str = ""
    """As in `allocation_started`."""
    attempt: Int = 0
    """As in `allocation_started`."""
    infra_rank: Int | None = None
    """Its place by the scheduler or by explicit wish."""
    failure_domain: str = ""
    """What fails together with it."""
    topology: tuple[str, ...] = ()
    """Where it sits in the network, outermost first."""
    last_round: Int | None = None
    """The last round that it took part in."""
    last_slot: Int | None = None
    """The slot that it held there."""
    last_step: Int | None = None
    """The last step that its ranks finished."""
    memory_steps: tuple[Int, ...] = ()
    """The steps of its slot that it still holds in memory."""
    checks: tuple[CheckResult, ...] = ()
    """What its checks found that is not `ok`."""
    warm: bool = False
    """It holds a process that has imported the script's modules already."""
    replica_port: Int | None = None
    """Where its replica server listens."""
    running_round: Int | None = None
    """The round whose ranks it still runs, when it was cut off and is back; None says that it
    runs none: those of `last_round` are gone."""
    master_port: Int | None = None
    """A port that it keeps free, for ranks to meet at should it get slot 0."""
    evidence_s: float = 0.0
    """How long it collected evidence at the end of `last_round`."""
    stop_s: float = 0.0
    """How long it then took until the last process of that round was gone."""
    device: str = ""
    """What its ranks run on."""
    version: str = ""
    """Its release."""


class Joined(Reply, frozen=True, kw_only=True, tag="joined.v1"):
    """Whether an agent may take part. Its order follows when a round forms."""

    round: Int
    """The newest round of the job: older orders are to be refused from now on."""
    is_accepted: bool
    """It may."""
    reason: str
    """Why not, or what is being waited for."""
    cause: str = ""
    """As in `node_refused`."""
    standing: str = "waiting"
    """`waiting` (for a round to form), `member`, `spare` or `refused`."""
    slot: Int | None = None
    """Its slot, for a member of the round that runs."""
    retry_after_s: float | None = None
    """Ask again after so long; None for not unless something changes."""
    exit_code: Int | None = None
    """Exit with this: the job is over, or the node will never be welcome."""
    order: StartRanks | StopRanks | StandBy | None = None
    """What it was ordered and may not have heard: a lost order is late, never missed."""


class Leave(Question, frozen=True, kw_only=True, tag="leave.v1"):
    """I go. An agent asks before it exits. The answer is `Done`."""

    node: str
    """The node."""
    instance: str
    """The agent's own id."""
    round: Int
    """The newest round that it knows."""
    cause: str
    """As in `node_left`."""
    reason: str
    """Why."""
    exit_code: Int | None = None
    """What it will exit with."""


class Report(Question, frozen=True, kw_only=True, tag="report.v1"):
    """Something happened in my part of the round. An agent asks what it means for the round."""

    node: str
    """The node."""
    slot: Int
    """Its slot."""
    round: Int
    """The round that it happened in."""
    event: str
    """`started` (all ranks run), `rank_exited`, `rank_stalled`, `rank_recovered`,
    `start_failed`, `finished` (all ranks exited with 0), `stopped`, `preempted` or
    `first_step`."""
    reason: str
    """What happened, past which limit."""
    fact: str | None = None
    """The id of the fact that says more."""
    rank: Int | None = None
    """The rank that it is about."""
    step: Int | None = None
    """The last step that the node's ranks finished."""
    fingerprint: str = ""
    """Of the failure, where the agent can tell."""
    exit_code: Int | None = None
    """The rank's, where there is one."""
    age_s: float = 0.0
    """How long ago it happened, when the agent could not say so before."""
    last_progress_age_s: float | None = None
    """How long ago the node's ranks last moved."""
    grace_s: float | None = None
    """For `preempted`: how much time there is."""
    instance: str = ""
    """The agent's own id, as in `join`: another agent's report about its slot is refused."""
    warm_ranks: Int = 0
    """For `started`: how many of its ranks were forked from a warm process."""


class Reported(Reply, frozen=True, kw_only=True, tag="reported.v1"):
    """What a report meant."""

    round: Int
    """The newest round."""
    is_current: bool
    """It was about that round; otherwise it changed nothing."""
    incident: str | None = None
    """The incident that it opened or joined."""
    phase: str = ""
    """The round's phase from now on."""


class ShowRound(Question, frozen=True, kw_only=True, tag="show_round.v1"):
    """How does the job stand? Anyone asks. The answer is a `RoundDocument`."""


class StopJob(Question, frozen=True, kw_only=True, tag="stop_job.v1"):
    """End the job. An operator asks.

    The answer is `Done` when it is decided, not when all has stopped.
    """

    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""
    save_first: bool = True
    """Save at the next step boundary before stopping."""


class RestartJob(Question, frozen=True, kw_only=True, tag="restart_job.v1"):
    """End the round and form another. An operator asks, or a service in enforce mode."""

    by: str
    """The person or service."""
    reason: str
    """Why."""
    round: Int
    """The round that they mean: another one is not touched."""
    without_nodes: tuple[str, ...] = ()
    """Nodes that are not to have a slot."""
    save_first: bool = False
    """Save at the next step boundary before stopping."""


class RequestSave(Question, frozen=True, kw_only=True, tag="request_save.v1"):
    """Save at the next step boundary. An operator asks; the answer is `Done` when ordered."""

    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""


class DrainNode(Question, frozen=True, kw_only=True, tag="drain_node.v1"):
    """Let a node go without harm: replace it after a save. An operator or health asks."""

    node: str
    """The node."""
    by: str
    """The person or service."""
    reason: str
    """Why."""
    within_s: float | None = None
    """After this long it goes without a save."""


class RequestEvidence(Question, frozen=True, kw_only=True, tag="request_evidence.v1"):
    """Have agents collect evidence. Attribution or an operator asks; it comes as facts."""

    incident: str
    """The incident that it belongs to."""
    round: Int
    """The round that it is about."""
    evidence: tuple[str, ...]
    """Which, as in `evidence_collected`."""
    within_s: float
    """What is not there by then is reported as missing."""
    nodes: tuple[str, ...] = ()
    """From these; empty for all."""
    ranks: tuple[Int, ...] = ()
    """From these global ranks; empty for all of the nodes'."""
    reason: str = ""
    """Why."""


class RequestChecks(Question, frozen=True, kw_only=True, tag="request_checks.v1"):
    """Have nodes examined. Health or an operator asks rendezvous; results come as facts."""

    nodes: tuple[str, ...]
    """Which."""
    by: str
    """The person or service."""
    reason: str
    """Why."""
    checks: tuple[str, ...] = ()
    """Which; empty for all that may run beside a training."""


class RequestCopy(Question, frozen=True, kw_only=True, tag="request_copy.v1"):
    """Have one node send a slot's state to another. The catalog asks rendezvous, to repair."""

    round: Int
    """The round that it is about."""
    owner_slot: Int
    """Whose state."""
    step: Int
    """Of which step."""
    holder: str
    """The node that has it."""
    to: str
    """The node that shall have it."""
    reason: str
    """Why."""


class ShowLimits(Question, frozen=True, kw_only=True, tag="show_limits.v1"):
    """Which limits apply? Anyone asks health. The answer is a `LimitsDocument`."""


class SetLimit(Question, frozen=True, kw_only=True, tag="set_limit.v1"):
    """Use this limit from now on. An operator asks health."""

    limit: SectionLimit
    """The limit; one of 0 s makes it learned again."""
    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""


class NodeStanding(Part, frozen=True, kw_only=True):
    """What health thinks of a node."""

    node: str
    """The node."""
    state: str
    """`healthy`, `suspect`, `lost`, `excluded` or `unknown`."""
    reason: str = ""
    """Why."""
    strikes: Int = 0
    """Strikes in the window, over all jobs."""
    silence_s: float | None = None
    """Since its last sign of life."""
    failing: tuple[CheckResult, ...] = ()
    """What its last checks found that is not `ok`."""
    exclusion: Exclusion | None = None
    """Its exclusion, if it is excluded."""


class ShowNodes(Question, frozen=True, kw_only=True, tag="show_nodes.v1"):
    """What do you think of these nodes? Rendezvous asks health before a round; people, too."""

    nodes: tuple[str, ...] = ()
    """Which; empty for all of the job's."""


class NodeStandings(Reply, frozen=True, kw_only=True, tag="node_standings.v1"):
    """What health thinks of nodes; those that it has never heard of are `unknown`."""

    nodes: tuple[NodeStanding, ...]
    """Each that was asked for, the worst first."""


class ExcludeNode(Question, frozen=True, kw_only=True, tag="exclude_node.v1"):
    """Let this node join nothing. An operator asks health; attribution may advise it."""

    node: str
    """The node."""
    by: str
    """The person or service."""
    reason: str
    """Why."""
    ttl_s: float | None = None
    """How long; None for the configured time."""


class IncludeNode(Question, frozen=True, kw_only=True, tag="include_node.v1"):
    """Let this node join again. An operator asks health."""

    node: str
    """The node."""
    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""


class RankScores(Part, frozen=True, kw_only=True):
    """How one rank compares."""

    rank: Int
    """The rank."""
    node: str
    """Its node."""
    role: str = ""
    """Its role group."""
    scores: tuple[Score, ...] = ()
    """Each signal."""
    is_straggler: bool = False
    """It is one by the rules in force."""


class ShowScores(Question, frozen=True, kw_only=True, tag="show_scores.v1"):
    """How do the ranks compare? Anyone asks straggler."""

    most: Int = 100
    """The slowest so many."""
    role: str = ""
    """Only this role group; empty for all."""


class RankScoreTable(Reply, frozen=True, kw_only=True, tag="rank_score_table.v1"):
    """How the ranks of a job compare, in its newest window."""

    round: Int
    """The round."""
    window: Int
    """The window."""
    ranks: tuple[RankScores, ...]
    """The slowest first."""
    ranks_seen: Int = 0
    """How many ranks were compared."""
    slowdown_ratio: float | None = None
    """How much faster the job would be without its stragglers: 0.12 for 12 %."""


class Explain(Question, frozen=True, kw_only=True, tag="explain.v1"):
    """Who caused this incident? Anyone asks attribution. The answer is a `VerdictReached`."""

    incident: str
    """The incident."""
    again: bool = False
    """Analyze once more, with what has come since."""


class LocateCheckpoint(Question, frozen=True, kw_only=True, tag="locate_checkpoint.v1"):
    """What can be restored, and from where? Agents ask before a round's ranks load.

    Without an answer they look at the files and their own memory.
    """

    round: Int
    """The round that will load it."""
    world_size: Int
    """Its ranks."""
    step: Int | None = None
    """This step only; None for the newest."""


class ReplicaPlace(Part, frozen=True, kw_only=True):
    """Where the state of one slot can be had from."""

    slot: Int
    """Whose state."""
    holders: tuple[Peer, ...]
    """Who has it in memory, the nearest first."""


class CheckpointPlace(Part, frozen=True, kw_only=True):
    """A checkpoint that can be restored, as far as the catalog knows."""

    step: Int
    """The step."""
    tier: str
    """The nearest tier in which it is complete."""
    path: str = ""
    """Where its manifest is, for the global tier."""
    saved_at: Time | None = None
    """When it was committed."""
    size_bytes: Int = 0
    """Of all shards."""
    world_size: Int | None = None
    """Ranks in the round that saved it."""
    replicas: tuple[ReplicaPlace, ...] = ()
    """For a tier in memory: where each slot's part is."""
    survivable_losses: Int | None = None
    """How many nodes may be lost before it is."""
    is_verified: bool = False
    """It was read back and compared."""
    is_pinned: bool = False
    """Retention may not have it."""
    is_quarantined: bool = False
    """It is not to be restored."""


class CheckpointsLocated(Reply, frozen=True, kw_only=True, tag="checkpoints_located.v1"):
    """What can be restored; the files are the truth, this is the index."""

    places: tuple[CheckpointPlace, ...]
    """The newest first; empty when the catalog knows of none."""
    rejected: tuple[RejectedStep, ...] = ()
    """Newer ones that cannot be used."""


class ListCheckpoints(Question, frozen=True, kw_only=True, tag="list_checkpoints.v1"):
    """Which checkpoints are there? Anyone asks the catalog; quarantined ones are included.

    The answer is a `CheckpointsLocated`.
    """

    most: Int = 100
    """The newest so many."""
    tier: str = ""
    """Only those in this tier; empty for all."""


class ChangeCheckpoint(Question, frozen=True, kw_only=True, tag="change_checkpoint.v1"):
    """Do something with a checkpoint. An operator asks the catalog."""

    step: Int
    """The step."""
    action: str
    """`pin`, `unpin`, `verify`, `quarantine`, `release` or `delete`."""
    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""
    tier: str = "global"
    """Where."""


class SetControl(Question, frozen=True, kw_only=True, tag="set_control.v1"):
    """Change switches at run time, or pull the brake. An operator asks health."""

    changes: Mapping[str, str]
    """By dotted name: `{"brake": "on"}`; an empty value goes back to the default."""
    by: str
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: str = ""
    """By which way: `rest` or `cli`."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a service can be asked: the verb, with what, and what comes back."""

    service: str
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
    Ask("rendezvous", "copy", RequestCopy, Done),
    Ask("health", "limits", ShowLimits, LimitsDocument),
    Ask("health", "set_limit", SetLimit, Done),
    Ask("health", "nodes", ShowNodes, NodeStandings),
    Ask("health", "exclude", ExcludeNode, Done),
    Ask("health", "include", IncludeNode, Done),
    Ask("health", "control", SetControl, Done),
    Ask("straggler", "scores", ShowScores, RankScoreTable),
    Ask("attribution", "explain", Explain, VerdictReached),
    Ask("catalog", "locate", LocateCheckpoint, CheckpointsLocated),
    Ask("catalog", "list", ListCheckpoints, CheckpointsLocated),
    Ask("catalog", "change", ChangeCheckpoint, Done),
)
"""Every question on the bus."""
