"""The document of a job in `CASES`: what attribution knows of each incident, for every analyzer.

The document is bounded, and so are its pieces: of a thousand ranks that fail together, all are
counted, and as many are described as fit.
"""

from everstep.messages.base import BlobRef, Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.incidents import VerdictCorrected, VerdictReached
from everstep.messages.facts.rounds import Member


class RankEnd(Part, frozen=True, kw_only=True):
    """How one rank ended, as in `rank_exited`, with long texts cut."""

    rank: Count
    """Its global rank."""
    node: Name
    """The node that it ran on."""
    fact: Name
    """The id of the `rank_exited`."""
    how: Name
    """As in `rank_exited`."""
    round: Count
    """The round that it was part of."""
    at: Time
    """By the clock of its node."""
    exit_code: Int | None = None
    """What it exited with."""
    signal: Name | None = None
    """The signal that ended it."""
    error_name: str = ""
    """The class of its last exception; empty where there was none."""
    error_text: str = ""
    """What that exception says."""
    place: str = ""
    """The innermost frame of the user's own code."""
    traceback: str = ""
    """The end of its traceback."""
    chain: tuple[str, ...] = ()
    """The classes of the exceptions that it was raised from, outermost first."""
    raised_at: Time | None = None
    """When it was raised, by the clock of its node."""
    first_error: str = ""
    """The first line of its output that reports an error."""
    step: Count | None = None
    """The last step that it finished."""
    section: Name | None = None
    """The innermost section that it was in."""
    core_dumped: bool = False
    """The kernel wrote a core file."""
    pid: Count = 0
    """Its process id on the node; 0 if unknown."""


class Stall(Part, frozen=True, kw_only=True):
    """A rank that made no progress, as in `rank_stalled`."""

    rank: Count
    """Its global rank."""
    node: Name
    """The node that it ran on."""
    fact: Name
    """The id of the `rank_stalled`."""
    round: Count
    """The round that it was part of."""
    phase: Name
    """As in `rank_stalled`."""
    waited_s: float
    """Since its last progress."""
    limit_s: float
    """The limit that it passed."""
    section: Name | None = None
    """The innermost section that was open."""
    step: Count | None = None
    """The last step that it finished."""
    signal: Name = ""
    """What showed its progress: `page` or `collectives`."""
    blocked_in: str = ""
    """Where it waited."""
    process_state: str = ""
    """The kernel's letter for it."""


class LocatedStall(Part, frozen=True, kw_only=True):
    """Which ranks stopped first, as in `stall_located`."""

    fact: Name
    """The id of the `stall_located`."""
    first_ranks: tuple[Int, ...]
    """The ranks that stopped first."""
    reason: str
    """The order of events."""
    waiting_ranks: Int = 0
    """How many others waited."""
    section: Name | None = None
    """The section that the first ranks were in."""
    is_certain: bool = False
    """No beat that could contradict it was missing."""


class NodeSign(Part, frozen=True, kw_only=True):
    """A sign about the condition of a node."""

    node: Name
    """The node."""
    sign: Name
    """`lost`, `returned`, `left`, `check`, `passed`, `suspected` or `cleared`."""
    reason: str
    """What was measured or seen."""
    fact: Name
    """The id of the fact that reported it."""
    at: Time
    """When, by the clock of its sender."""
    check: Name = ""
    """The check that failed: `gpu`, `nvlink`, `nic`, `storage`, `host`."""
    failure_class: Name = ""
    """What would help, as in a check's result."""
    code: str = ""
    """The part's own word for it: `XID 79`."""
    cause: Name = ""
    """For `left` the cause of it, for `returned` how it was away."""


class OutsideAct(Part, frozen=True, kw_only=True):
    """Something from outside the training that ends or moves it."""

    act: Name
    """`preempted`, or the action of a person: `stop_job`, `restart_job`, `drain_node` …"""
    by: Name
    """Who: a person, `slurm`, `signal` …"""
    reason: str
    """In their words."""
    fact: Name
    """The id of the fact that reported it."""
    node: Name | None = None
    """The node that it is about; None for the whole job."""


class SaveFailure(Part, frozen=True, kw_only=True):
    """A save or a restore that failed."""

    fact: Name
    """The id of the fact that reported it."""
    stage: Name
    """Where it failed, as in `checkpoint_failed`; `restore` for a restore."""
    reason: str
    """What went wrong."""
    node: Name | None = None
    """The node that it failed on, where that is known."""
    rank: Count | None = None
    """The rank, where that is known."""


class SlowRankSign(Part, frozen=True, kw_only=True):
    """A finding about a slow rank that was open when the incident began."""

    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    cause: Name
    """As in `straggler_found`."""
    reason: str
    """The numbers."""
    fact: Name
    """The id of the `straggler_found`."""
    confidence: float | None = None
    """0 to 1."""


class EvidencePiece(Part, frozen=True, kw_only=True):
    """A piece of evidence, or why there is none, as in `evidence_collected`."""

    evidence: Name
    """Its kind."""
    node: Name
    """The node that it comes from."""
    fact: Name
    """The id of the `evidence_collected`."""
    rank: Count | None = None
    """The rank that it is about; None for all of the node."""
    blob: BlobRef | None = None
    """Where it is."""
    summary: str = ""
    """What it says in a line."""
    missing: str = ""
    """Why there is none."""


class PastIncident(Part, frozen=True, kw_only=True):
    """An earlier incident, as far as it tells something about later ones."""

    job: Name
    """The job."""
    incident: Name
    """The incident."""
    at: Time
    """When its verdict was reached."""
    cause: Name
    """The cause class of its verdict."""
    fingerprint: str = ""
    """That of its verdict."""
    ranks: tuple[Int, ...] = ()
    """The culprits among ranks, at most 16."""
    nodes: tuple[Name, ...] = ()
    """The culprits among nodes, at most 16."""
    step: Count | None = None
    """The last step that the training had finished."""
    is_corrected: bool = False
    """A person gave this verdict."""


class PolicyAct(Part, frozen=True, kw_only=True):
    """Something that the policy has decided about an incident. It decides nothing twice."""

    decision: Name
    """The id of its `action_decided`."""
    action: Name
    """The action."""
    is_over: bool = False
    """Its `action_taken` is decided, too."""


class Case(Part, frozen=True, kw_only=True):
    """All that is known of one incident."""

    job: Name
    """The job."""
    incident: Name
    """The incident's id; empty while none was opened for what is in it."""
    round: Count
    """The round that it began in."""
    trigger: Name = ""
    """As in `incident_opened`."""
    reason: str = ""
    """As in `incident_opened`."""
    trigger_fact: Name | None = None
    """The id of the report that explains the others best."""
    node: Name | None = None
    """The node that this report is about."""
    rank: Count | None = None
    """The rank that it is about."""
    step: Count | None = None
    """The last step that the training finished."""
    phase: Name = ""
    """Where the training was."""
    section: Name | None = None
    """The section that the rank was in."""
    opened_at: Time | None = None
    """When it was opened."""
    world_size: Count = 0
    """Ranks in the round."""
    members: tuple[Member, ...] = ()
    """The nodes of the round, and which ranks each runs."""
    ends: tuple[RankEnd, ...] = ()
    """Ranks that did not end well, in the order of their reports."""
    more_ends: Count = 0
    """How many more ended than are listed."""
    done: tuple[RankEnd, ...] = ()
    """Ranks that ended well, in the order of their reports."""
    more_done: Count = 0
    """How many more ended well than are listed."""
    stalls: tuple[Stall, ...] = ()
    """Ranks that stalled."""
    warned_stalls: tuple[Stall, ...] = ()
    """Ranks that passed a limit that ends no round."""
    located: LocatedStall | None = None
    """Which ranks stopped first."""
    nodes: tuple[NodeSign, ...] = ()
    """Signs about its nodes, the oldest first."""
    outside: tuple[OutsideAct, ...] = ()
    """What people and schedulers did."""
    saves: tuple[SaveFailure, ...] = ()
    """Saves and restores that failed."""
    slow: tuple[SlowRankSign, ...] = ()
    """Slow ranks."""
    evidence: tuple[EvidencePiece, ...] = ()
    """The pieces that were collected, and those that are missing, with the reason."""
    stopped: tuple[Name, ...] = ()
    """Nodes that have stopped their ranks: what they had collected is on its way."""
    past: tuple[PastIncident, ...] = ()
    """Earlier incidents of this job, of its nodes, and with the same fingerprint."""
    outcome: Name = ""
    """As in `incident_closed`; empty while it is open."""
    verdict: VerdictReached | None = None
    """The verdict in force; None while there is none."""
    correction: VerdictCorrected | None = None
    """The correction by a person."""
    acts: tuple[PolicyAct, ...] = ()
    """The decisions of the policy about it."""

    def node_of(self, rank: int) -> str | None:
        """The node that a rank ran on; None if unknown."""
        for member in self.members:
            if member.first_rank <= rank < member.first_rank + member.ranks:
                return member.node
        return next((end.node for end in self.ends if end.rank == rank), None)

    def ranks_of(self, node: str) -> tuple[int, ...]:
        """The ranks of a node, as far as they are known."""
        ranks = {end.rank for end in self.ends if end.node == node}
        for member in self.members:
            if member.node == node:
                ranks.update(range(member.first_rank, member.first_rank + member.ranks))
        return tuple(sorted(ranks))


class CasesDocument(DocumentBody, frozen=True, kw_only=True, tag="cases_document.v1"):
    """What attribution knows of a job's incidents: any replica can continue from it.

    Key: the job; `everstep.subjects.CLUSTER` holds how far the facts of all jobs were read, and
    what is known of nodes and incidents of all jobs.
    """

    cases: tuple[Case, ...] = ()
    """The newest incidents, the oldest first; the last one may not have been opened yet."""
    members: tuple[Member, ...] = ()
    """The nodes of the newest round."""
    round: Count = 0
    """The newest known round."""
    world_size: Count = 0
    """Its ranks."""
    step: Count | None = None
    """The last known step."""
    slow: tuple[SlowRankSign, ...] = ()
    """Findings about slow ranks that are open."""
    nodes: tuple[NodeSign, ...] = ()
    """In the document of all jobs: the newest signs of each node."""
    past: tuple[PastIncident, ...] = ()
    """In the document of all jobs: earlier incidents, the oldest first."""
    ended_at: Time | None = None
    """When the job ended; None while it goes on."""
    stream: str = ""
    """The incarnation of the stream of facts that was read."""
    sequence: Int = 0
    """How far it was read."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
