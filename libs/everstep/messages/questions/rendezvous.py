"""Questions of agents, people and services to rendezvous, and their replies."""

from everstep.messages.base import Count, Int, Name, Question, Reply
from everstep.messages.facts.health import CheckResult
from everstep.messages.facts.jobs import JobSpec
from everstep.messages.orders import AwaitRound, StandBy, StartRanks, StopRanks


class Join(Question, frozen=True, kw_only=True, tag="join.v1"):
    """May I take part? An agent asks at its start, after each round, and until it may."""

    node: Name
    """The node."""
    instance: Name
    """The agent's own id, another after each start: tells a second node with the same name."""
    spec: JobSpec
    """What it believes the job to be."""
    allocation: Name
    """Its allocation."""
    address: Name
    """Where other nodes reach it."""
    ranks: Count
    """How many processes it can run."""
    scheduler: Name = "none"
    """As in `allocation_started`."""
    scheduler_job: Name = ""
    """As in `allocation_started`."""
    attempt: Count = 0
    """As in `allocation_started`."""
    infra_rank: Int | None = None
    """Its place by the scheduler or by explicit wish."""
    failure_domain: Name = ""
    """What fails together with it."""
    topology: tuple[str, ...] = ()
    """This node's place in the network, outermost first."""
    group: Name = ""
    """The nodes that are replaced together with it, in a job with replacement groups."""
    last_round: Int | None = None
    """The last round that it took part in."""
    last_slot: Int | None = None
    """The slot that it held there."""
    last_step: Count | None = None
    """The last step that its ranks finished."""
    memory_steps: tuple[Int, ...] = ()
    """The steps of its slot that it still holds in memory."""
    checks: tuple[CheckResult, ...] = ()
    """What its checks found that is not `ok`."""
    warm: bool = False
    """It holds a process that has imported the script's modules already."""
    replica_port: Int | None = None
    """Where its replica server listens."""
    known_round: Int = 0
    """The newest round that it has heard of: it refuses orders of any before."""
    running: StartRanks | None = None
    """What it was ordered to run, and still runs, when it was cut off and is back: from this a lost
    document is made again. None says that it runs none: those of `last_round` are gone."""
    running_state: str = ""
    """Of those ranks: `finished`, when all have exited with 0, `stopped`, when they did after
    the agent asked them to, `failed`, when one has not; empty while they run or start."""
    master_port: Int | None = None
    """A port that it keeps free, for ranks to meet at should it get slot 0."""
    evidence_s: float = 0.0
    """How long it collected evidence at the end of `last_round`."""
    stop_s: float = 0.0
    """How long it then took until the last process of that round was gone."""
    device: Name = ""
    """What its ranks run on."""
    version: Name = ""
    """Its release."""
    nvlink_domain: Name = ""
    """The NVLink domain of its GPUs, named by their ClusterUUID; empty for none."""

    @property
    def running_round(self) -> int | None:
        """The round whose ranks it still runs."""
        return None if self.running is None else self.running.round


class Joined(Reply, frozen=True, kw_only=True, tag="joined.v1"):
    """Whether an agent may take part. Its order follows when a round forms."""

    round: Count
    """The newest round of the job: older orders must be refused from now on."""
    is_accepted: bool
    """It may."""
    reason: str
    """Why not, or what is being waited for."""
    cause: Name = ""
    """As in `node_refused`."""
    standing: str = "waiting"
    """`waiting` (for a round to form), `member`, `spare`, `refused`, or `leaving` (its node is
    replaced: it must exit)."""
    slot: Count | None = None
    """Its slot, for a member of the round that runs."""
    retry_after_s: float | None = None
    """Ask again after this time; None: only when something changes."""
    exit_code: Int | None = None
    """Exit with this: the job is over, or the node will never be welcome."""
    order: StartRanks | StopRanks | StandBy | AwaitRound | None = None
    """What it was ordered and may not have heard: a lost order is late, never missed."""


class Leave(Question, frozen=True, kw_only=True, tag="leave.v1"):
    """I go. An agent asks before it exits. The answer is `Done`."""

    node: Name
    """The node."""
    instance: Name
    """The agent's own id."""
    round: Count
    """The newest round that it knows."""
    cause: Name
    """As in `node_left`."""
    reason: str
    """Why."""
    exit_code: Int | None = None
    """What it will exit with."""


class Report(Question, frozen=True, kw_only=True, tag="report.v1"):
    """Something happened in my part of the round. An agent asks what it means for the round."""

    node: Name
    """The node."""
    slot: Count
    """Its slot; 0 for the `check_compared` of a spare."""
    round: Count
    """The round that it happened in."""
    event: str
    """`started` (all ranks run), `rank_exited`, `rank_stalled`, `rank_recovered`,
    `start_failed`, `check_failed` (a probe whose policy ends the round), `check_recovered`,
    `check_compared` (the answer to `run_checks` with the occasion `compare`), `finished` (all ranks
    exited with 0), `stopped` (all ranks exited with 0 after the agent asked them to), `preempted`,
    `first_step`, `excused` (the answer to `name_excuse`) or `reached` (the answer to
    `save_checkpoint` without a step)."""
    reason: str
    """What happened, past which limit."""
    fact: str | None = None
    """The id of the fact that says more."""
    rank: Count | None = None
    """The rank that it is about; for `excused` the one that has stalled."""
    step: Count | None = None
    """The last step that the node's ranks finished; for `reached` None if the SDK counts none."""
    fingerprint: str = ""
    """Of the failure, where the agent can tell."""
    exit_code: Int | None = None
    """The rank's, where there is one."""
    age_s: float = 0.0
    """How long ago it happened, when the agent could not report it earlier."""
    last_progress_age_s: float | None = None
    """How long ago the node's ranks last moved."""
    grace_s: float | None = None
    """For `preempted`: how much time there is."""
    waited_s: float | None = None
    """For `rank_stalled`: since its last progress."""
    entered: Int | None = None
    """For `rank_stalled`, where the rank is in no collective: the last that it has entered of the
    group of all ranks; None if nobody knows."""
    excuse_s: float | None = None
    """For `excused`: how long the rank that it may wait for may go on before it has stalled."""
    step_s: float | None = None
    """For `reached`: how long its steps take."""
    instance: Name = ""
    """The agent's own id, as in `join`: another agent's report about its slot is refused."""
    warm_ranks: Int = 0
    """For `started`: how many of its ranks were forked from a warm process."""
    restore_s: float = 0.0
    """For `first_step`: how long its ranks took to have their state back."""
    is_of_code: bool = False
    """For `rank_exited`: the kind of the exception says that the program is wrong."""
    check: Name = ""
    """For `check_failed`, `check_recovered` and `check_compared`: the check."""
    check_state: Name = ""
    """For `check_compared`: its state, as in `check_result`."""
    policy: Name = ""
    """For `check_failed`: `end_round` or `exclude`."""


class Reported(Reply, frozen=True, kw_only=True, tag="reported.v1"):
    """What a report meant."""

    round: Count
    """The newest round."""
    is_current: bool
    """It was about that round; otherwise it changed nothing."""
    incident: Name | None = None
    """The incident that it opened or joined."""
    phase: Name = ""
    """The round's phase from now on."""


class ShowRound(Question, frozen=True, kw_only=True, tag="show_round.v1"):
    """How does the job stand? Anyone asks. The answer is a `RoundDocument`."""


class StopJob(Question, frozen=True, kw_only=True, tag="stop_job.v1"):
    """End the job. An operator asks, or an agent whose script does.

    The answer is `Done` when it is decided, not when all has stopped.
    """

    by: Name
    """The person, as authenticated; or `rank 3 of node-1`."""
    reason: str
    """Why."""
    save_first: bool = True
    """Save at the next step boundary before stopping."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `script`."""


class RestartJob(Question, frozen=True, kw_only=True, tag="restart_job.v1"):
    """End the round and form another. An operator asks, or a service in enforce mode."""

    by: Name
    """The person or service."""
    reason: str
    """Why."""
    round: Count
    """The round that they mean: another one is not touched."""
    without_nodes: tuple[Name, ...] = ()
    """Nodes that are not to have a slot."""
    save_first: bool = False
    """Save at the next step boundary before stopping."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class RequestSave(Question, frozen=True, kw_only=True, tag="request_save.v1"):
    """Save at the next step boundary. An operator asks; the answer is `Done` when ordered."""

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class DrainNode(Question, frozen=True, kw_only=True, tag="drain_node.v1"):
    """Let a node go without harm: replace it after a save.

    An operator or health asks, or its agent when its script does.
    """

    node: Name
    """The node."""
    by: Name
    """The person or service; or `rank 3 of node-1`."""
    reason: str
    """Why."""
    within_s: float | None = None
    """After this long it goes without a save."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `script`."""


class RequestEvidence(Question, frozen=True, kw_only=True, tag="request_evidence.v1"):
    """Have agents collect evidence of ranks that go on. It comes as facts.

    Attribution asks about an incident; an operator for a capture of a round that is well.
    """

    incident: Name
    """The incident that it belongs to, or `capture-` and the id of the capture."""
    evidence: tuple[str, ...]
    """Which, as in `evidence_collected`."""
    within_s: float
    """What is not there by then is reported as missing."""
    nodes: tuple[Name, ...] = ()
    """From these; empty for all."""
    ranks: tuple[Int, ...] = ()
    """From these global ranks; empty for all of the nodes'."""
    reason: str = ""
    """Why."""
    round: Count = 0
    """The round that it is about; 0 for whichever runs."""
    by: Name = "attribution"
    """The person, as authenticated, or the service."""
    origin: Name = ""
    """The interface: `rest` or `cli`; empty for a service."""


class RequestChecks(Question, frozen=True, kw_only=True, tag="request_checks.v1"):
    """Have nodes examined. Health or an operator asks rendezvous; results come as facts."""

    nodes: tuple[Name, ...]
    """Which."""
    by: Name
    """The person or service."""
    reason: str
    """Why."""
    checks: tuple[str, ...] = ()
    """The checks to run; empty for all that may run during a training."""
    origin: Name = ""
    """The interface: `rest` or `cli`; empty for a service."""


class RequestMeasurement(Question, frozen=True, kw_only=True, tag="request_measurement.v1"):
    """Have nodes measure the network with each other. An operator asks rendezvous.

    Figures come as facts, a `network_measured` for each node.
    """

    test: str
    """The id that the test is to have, made by the caller."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    nodes: tuple[Name, ...] = ()
    """Which; empty for all that are here."""
    partners: Int = 8
    """With how many others each of them measures, at most."""
    is_beside_training: bool = False
    """Also on nodes whose ranks run, which slows them."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class RequestRelease(Question, frozen=True, kw_only=True, tag="request_release.v1"):
    """Have quarantined states in the memory of nodes released. The catalog asks rendezvous.

    It is on record there who wants it; what was released comes as facts, from each node.
    """

    step: Count
    """The step."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""


class RequestCopy(Question, frozen=True, kw_only=True, tag="request_copy.v1"):
    """Have one node send a slot's state to another. The catalog asks rendezvous, to repair."""

    round: Count
    """The round that it is about."""
    owner_slot: Count
    """The slot whose state it is."""
    step: Count
    """The step."""
    holder: Name
    """The node that has it."""
    to: str
    """The node that receives it."""
    reason: str
    """Why."""
