"""The document of a job in `CASES`: what attribution knows of each incident, for every analyzer.

The document is bounded, and so are its pieces: of a thousand ranks that fail together, all are
counted, and as many are described as fit.
"""

from everstep.messages.base import BlobRef, Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.incidents import VerdictCorrected, VerdictReached
from everstep.messages.facts.numerics import NumericsJudged
from everstep.messages.facts.rounds import Member


class RankEnd(Part, frozen=True, kw_only=True):
    """How one rank ended, as in `rank_exited`, with long texts cut."""

    rank: Count
    """The rank's number in the world."""
    node: Name
    """The node on which the rank ran."""
    fact: Name
    """The id of the `rank_exited`."""
    how: Name
    """As in `rank_exited`."""
    round: Count
    """The round of the rank."""
    at: Time
    """When the rank ended, by the clock of its node."""
    exit_code: Int | None = None
    """The exit code."""
    signal: Name | None = None
    """The signal that ended the process."""
    error_name: str = ""
    """The class of the rank's last exception; empty where there was none."""
    error_text: str = ""
    """The message of that exception."""
    place: str = ""
    """The innermost frame of the user's own code."""
    traceback: str = ""
    """The end of the traceback."""
    chain: tuple[str, ...] = ()
    """The classes of the exceptions that led to this one, outermost first."""
    asks: Name = ""
    """As in `error_record`."""
    raised_at: Time | None = None
    """When the exception was raised, by the clock of the node."""
    first_error: str = ""
    """The first line of the rank's output that reports an error."""
    step: Count | None = None
    """The last step that the rank finished."""
    section: Name | None = None
    """The innermost section in which the rank was."""
    core_dumped: bool = False
    """The kernel wrote a core file."""
    pid: Count = 0
    """The process id of the rank on its node; 0 if unknown."""
    is_pid_of_host: bool = False
    """The kernel's log has the same id for the process."""


class Stall(Part, frozen=True, kw_only=True):
    """A rank that made no progress, as in `rank_stalled`."""

    rank: Count
    """The rank's number in the world."""
    node: Name
    """The node on which the rank ran."""
    fact: Name
    """The id of the `rank_stalled`."""
    round: Count
    """The round of the rank."""
    phase: Name
    """As in `rank_stalled`."""
    waited_s: float
    """The time since the rank's last progress."""
    limit_s: float
    """The limit that was passed."""
    section: Name | None = None
    """The innermost section that was open."""
    step: Count | None = None
    """The last step that the rank finished."""
    signal: Name = ""
    """What showed the rank's progress: `page`, `collectives` or `monitor`."""
    blocked_in: str = ""
    """Where the rank waited."""
    process_state: str = ""
    """The kernel's letter for the process."""
    is_waiting_for_ranks: bool | None = None
    """As in `rank_stalled`."""


class LocatedStall(Part, frozen=True, kw_only=True):
    """Which ranks stopped first, as in `stall_located`."""

    fact: Name
    """The id of the `stall_located`."""
    first_ranks: tuple[Int, ...]
    """The ranks that stopped first."""
    reason: str
    """The order of events."""
    waiting_ranks: Int = 0
    """How many other ranks waited."""
    section: Name | None = None
    """The section in which the first ranks were."""
    is_certain: bool = False
    """Every beat that could contradict the finding had arrived."""


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
    """When that was reported, by the clock of the sender."""
    check: Name = ""
    """The check that failed: `gpu`, `nvlink`, `nic`, `storage`, `host`."""
    failure_class: Name = ""
    """What would help, as in a check's result."""
    code: str = ""
    """The part's own code for the failure: `XID 79`."""
    cause: Name = ""
    """For `left` the cause, as in `node_left`; for `returned` the way in which the node was
    away; for `lost` `paused` if only its agent is silent."""
    silence_s: float = 0.0
    """For `lost`: how long the node had been silent."""


class OutsideAct(Part, frozen=True, kw_only=True):
    """Something from outside the training that ends or moves it."""

    act: Name
    """`preempted`; the action of a person: `stop_job`, `restart_job`, `drain_node` …; or
    `injected`: the reason is then the fault."""
    by: Name
    """The person, or the source of the notice: `slurm`, `signal` …"""
    reason: str
    """Why, in the words of that person or notice."""
    fact: Name
    """The id of the fact that reported it."""
    node: Name | None = None
    """The node that the act is about; None for the whole job."""
    rank: Count | None = None
    """The rank that the act is about, where it is about one."""
    at: Time | None = None
    """When it was asked for or noticed, by the clock of the sender; None if unknown."""
    lasts_s: float | None = None
    """For an injected fault: how long it lasts; None if it does not end."""


class SaveFailure(Part, frozen=True, kw_only=True):
    """A save or a restore that failed."""

    fact: Name
    """The id of the fact that reported it."""
    stage: Name
    """The stage that failed, as in `checkpoint_failed`; `restore` for a restore."""
    reason: str
    """What went wrong."""
    node: Name | None = None
    """The node on which it failed, where that is known."""
    rank: Count | None = None
    """The rank on which it failed, where that is known."""
    at: Time | None = None
    """When it was reported, by the clock of the sender; None if unknown."""


class SlowRankSign(Part, frozen=True, kw_only=True):
    """A finding about a slow rank that was open when the incident began."""

    rank: Count
    """The rank."""
    node: Name
    """The node of the rank."""
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
    """The kind of the evidence."""
    node: Name
    """The node that the evidence comes from."""
    fact: Name
    """The id of the `evidence_collected`."""
    rank: Count | None = None
    """The rank that the evidence is about; None for the whole node."""
    blob: BlobRef | None = None
    """Where the evidence is stored."""
    summary: str = ""
    """The content in a line."""
    missing: str = ""
    """Why there is no evidence."""


class PastIncident(Part, frozen=True, kw_only=True):
    """An earlier incident, as far as it helps to judge later ones."""

    job: Name
    """The job."""
    incident: Name
    """The incident."""
    at: Time
    """When the verdict was reached."""
    cause: Name
    """The cause class of the verdict."""
    fingerprint: str = ""
    """The fingerprint of the verdict."""
    ranks: tuple[Int, ...] = ()
    """The culprits among ranks, at most 16."""
    nodes: tuple[Name, ...] = ()
    """The culprits among nodes, at most 16."""
    step: Count | None = None
    """The last step that the training had finished."""
    is_corrected: bool = False
    """A person gave this verdict."""
    retry: str = ""
    """Whether another attempt may succeed, as in the verdict; empty in older ones."""


class PolicyAct(Part, frozen=True, kw_only=True):
    """A decision of the policy about an incident: the policy decides nothing twice."""

    decision: Name
    """The id of the `action_decided`."""
    action: Name
    """The action."""
    is_over: bool = False
    """The `action_taken` is decided, too."""


class Case(Part, frozen=True, kw_only=True):
    """All that is known of one incident."""

    job: Name
    """The job."""
    incident: Name
    """The incident's id; empty before an incident was opened."""
    round: Count
    """The round in which the incident began."""
    trigger: Name = ""
    """As in `incident_opened`."""
    reason: str = ""
    """As in `incident_opened`."""
    error_name: str = ""
    """As in `incident_opened`."""
    trigger_fact: Name | None = None
    """The id of the report that explains the others best."""
    node: Name | None = None
    """The node that this report is about."""
    rank: Count | None = None
    """The rank that this report is about."""
    step: Count | None = None
    """The last step that the training finished."""
    phase: Name = ""
    """Where the training was, as in `incident_opened`."""
    section: Name | None = None
    """The section in which that rank was."""
    opened_at: Time | None = None
    """When the incident was opened."""
    world_size: Count = 0
    """The number of ranks in the round."""
    members: tuple[Member, ...] = ()
    """The nodes of the round, and the ranks of each."""
    ends: tuple[RankEnd, ...] = ()
    """Ranks that did not end well, in the order of their reports."""
    more_ends: Count = 0
    """How many more ranks ended than are listed."""
    done: tuple[RankEnd, ...] = ()
    """Ranks that ended well, in the order of their reports."""
    more_done: Count = 0
    """How many more ranks ended well than are listed."""
    stalls: tuple[Stall, ...] = ()
    """Ranks that stalled."""
    warned_stalls: tuple[Stall, ...] = ()
    """Ranks that passed a limit which ends no round."""
    located: LocatedStall | None = None
    """Which ranks stopped first."""
    nodes: tuple[NodeSign, ...] = ()
    """Signs about the nodes of the round, the oldest first."""
    outside: tuple[OutsideAct, ...] = ()
    """What people and schedulers did."""
    is_of_agent: bool = False
    """An agent opened it while its round goes on: how ranks end later belongs to no such case."""
    results: tuple[NumericsJudged, ...] = ()
    """Judgements of results that cannot be right, at most 8; of a round that ended because of one,
    the last one."""
    saves: tuple[SaveFailure, ...] = ()
    """Saves and restores that failed."""
    slow: tuple[SlowRankSign, ...] = ()
    """Slow ranks."""
    evidence: tuple[EvidencePiece, ...] = ()
    """The pieces that were collected, and those that are missing, with the reason."""
    stopped: tuple[Name, ...] = ()
    """Nodes that have stopped their ranks: their evidence is on its way."""
    last_round: Count = 0
    """The newest round that the incident has ended, whose nodes `stopped` has; 0: `round`."""
    past: tuple[PastIncident, ...] = ()
    """Earlier incidents of this job, of its nodes, and with the same fingerprint."""
    outcome: Name = ""
    """As in `incident_closed`; empty while the incident is open."""
    verdict: VerdictReached | None = None
    """The verdict that holds; None while there is none."""
    correction: VerdictCorrected | None = None
    """The correction by a person."""
    acts: tuple[PolicyAct, ...] = ()
    """The decisions of the policy about the incident."""

    @property
    def last_step(self) -> int | None:
        """The last step that any failed rank finished, else that of the training.

        What the training has reported is older, and begins at 0 in each round of some scripts.
        """
        steps = [end.step for end in self.ends if end.step is not None]
        return max(steps, default=self.step)

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

    Key: the job; the document of `everstep.subjects.CLUSTER` has the position in the facts of
    all jobs, and what is known of nodes and incidents of all jobs.
    """

    cases: tuple[Case, ...] = ()
    """All incidents without a verdict and the newest with one, the oldest first; the last of them
    may not have been opened yet."""
    members: tuple[Member, ...] = ()
    """The nodes of the newest round."""
    round: Count = 0
    """The newest known round."""
    world_size: Count = 0
    """The number of ranks in that round."""
    step: Count | None = None
    """The last known step."""
    slow: tuple[SlowRankSign, ...] = ()
    """Findings about slow ranks that are open."""
    nodes: tuple[NodeSign, ...] = ()
    """In the document of all jobs: the newest signs of each node."""
    past: tuple[PastIncident, ...] = ()
    """In the document of all jobs: earlier incidents, the oldest first."""
    ended_at: Time | None = None
    """When the job ended; None while it continues."""
    stream: str = ""
    """The incarnation of the stream of facts."""
    sequence: Int = 0
    """The position in that stream up to which facts were read."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
