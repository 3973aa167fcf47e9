"""Questions of agents, people and services to rendezvous, and their replies."""

from everstep.messages.base import Count, Int, Name, Question, Reply, RoundNumber
from everstep.messages.facts.health import CheckResult, NetworkFigures
from everstep.messages.facts.jobs import JobSpec
from everstep.messages.orders import AwaitRound, GroupPosition, StandBy, StartRanks, StopRanks


class Join(Question, frozen=True, kw_only=True, tag="join.v1"):
    """May my node take part? An agent asks at its start, after each round, and until it may."""

    node: Name
    """The node."""
    instance: Name
    """The agent's own id, another one after each start, which tells two nodes with the same name
    apart."""
    spec: JobSpec
    """The job's specification, as the agent has it."""
    allocation: Name
    """The allocation of the agent."""
    address: Name
    """The host name or IP address at which other nodes reach the node."""
    ranks: Count
    """How many ranks the node can run."""
    scheduler: Name = "none"
    """As in `allocation_started`."""
    scheduler_job: Name = ""
    """As in `allocation_started`."""
    attempt: Count = 0
    """As in `allocation_started`."""
    infra_rank: Int | None = None
    """The node's place by the scheduler or by an option."""
    failure_domain: Name = ""
    """As in `node_joined`."""
    topology: tuple[str, ...] = ()
    """The node's place in the network, outermost first."""
    group: Name = ""
    """The node's replacement group: its nodes are replaced together."""
    last_round: RoundNumber | None = None
    """The last round in which the node took part."""
    last_slot: Int | None = None
    """The slot that the node held in that round."""
    last_step: Count | None = None
    """The last step that the node's ranks finished."""
    memory_steps: tuple[Int, ...] = ()
    """The steps of that slot whose state the node still holds in memory."""
    checks: tuple[CheckResult, ...] = ()
    """The results of the node's checks that are not `ok`."""
    warm: bool = False
    """The node has a process that has already imported the script's modules."""
    replica_port: Int | None = None
    """The port of the node's replica server."""
    known_round: RoundNumber = 0
    """The newest round that the agent has heard of: it refuses orders of older rounds."""
    running: StartRanks | None = None
    """The order whose ranks the agent still runs after it was cut off: from it, rendezvous can make
    a lost document again. None says that no ranks run: those of `last_round` are gone."""
    running_state: str = ""
    """The state of those ranks: `finished` (all have exited with 0), `stopped` (the same, after the
    agent asked them to stop) or `failed` (a rank has not); empty while they run or start."""
    master_port: Int | None = None
    """A port that the node keeps free, at which ranks can meet if the node gets slot 0."""
    evidence_s: float = 0.0
    """How long the agent collected evidence at the end of `last_round`."""
    stop_s: float = 0.0
    """How long the agent then needed until the last process of that round was gone."""
    device: Name = ""
    """The device of the node's ranks."""
    version: Name = ""
    """The agent's release."""
    network: NetworkFigures | None = None
    """The figures of the node's last network test."""
    unsaved: Count = 0
    """How many ranks are parked since `last_round`, and have not saved their states since."""
    nvlink_domain: Name = ""
    """The NVLink domain of the node's GPUs, named by their ClusterUUID; empty for none."""

    @property
    def running_round(self) -> int | None:
        """The round whose ranks it still runs."""
        return None if self.running is None else self.running.round


class Joined(Reply, frozen=True, kw_only=True, tag="joined.v1"):
    """Whether a node may take part. An order follows when a round forms."""

    round: Count
    """The newest round of the job: older orders must be refused from now on."""
    is_accepted: bool
    """The node may take part."""
    reason: str
    """Why the node may not take part, or what rendezvous is waiting for."""
    cause: Name = ""
    """As in `node_refused`."""
    standing: str = "waiting"
    """`waiting` (for a round to form), `member`, `spare`, `refused`, or `leaving` (the node is
    replaced, and its agent must exit)."""
    slot: Count | None = None
    """The node's slot, for a member of the round that runs."""
    retry_after_s: float | None = None
    """The agent should ask again after this time; None: only when something changes."""
    exit_code: Int | None = None
    """The agent must exit with this code: the job is over, or the node will never be accepted."""
    order: StartRanks | StopRanks | StandBy | AwaitRound | None = None
    """The newest order to the node, in case it was lost: so an order can be late, but is never
    missed."""


class Leave(Question, frozen=True, kw_only=True, tag="leave.v1"):
    """My node leaves. An agent asks before it exits. The answer is `Done`."""

    node: Name
    """The node."""
    instance: Name
    """The agent's own id."""
    round: Count
    """The newest round that the agent knows."""
    cause: Name
    """As in `node_left`."""
    reason: str
    """Why."""
    exit_code: Int | None = None
    """The exit code of the agent."""
    last_step: Count | None = None
    """The last step that the node's ranks finished in that round."""


class Report(Question, frozen=True, kw_only=True, tag="report.v1"):
    """Something happened on my node. An agent asks what it means for the round."""

    node: Name
    """The node."""
    slot: Count
    """The node's slot; 0 for the `check_compared` of a spare."""
    round: Count
    """The round in which it happened."""
    event: str
    """`started` (all ranks run), `rank_exited`, `rank_stalled`, `rank_recovered`,
    `start_failed`, `check_failed` (a probe whose policy ends the round), `check_recovered`,
    `check_compared` (the answer to `run_checks` with the occasion `compare`), `finished` (all ranks
    exited with 0), `stopped` (all ranks exited with 0 after the agent asked them to), `preempted`,
    `first_step`, `first_collective` (it began `last_progress_age_s` ago), `excused` (the answer to
    `name_excuse`) or `reached` (the answer to `save_checkpoint` without a step)."""
    reason: str
    """What happened, and which limit was passed."""
    fact: str | None = None
    """The id of the fact with the details."""
    rank: Count | None = None
    """The rank that the report is about; for `excused` the rank that has stalled."""
    step: Count | None = None
    """The last step that the node's ranks finished; for `reached` None if the SDK counts no
    steps."""
    fingerprint: str = ""
    """The fingerprint of the failure, where the agent knows it."""
    exit_code: Int | None = None
    """The exit code of the rank, where there is one."""
    age_s: float = 0.0
    """How long ago the event was, when the agent could not report it earlier."""
    last_progress_age_s: float | None = None
    """How long ago the node's ranks last made progress."""
    grace_s: float | None = None
    """For `preempted`: how much time is left."""
    waited_s: float | None = None
    """For `rank_stalled`: the time since the rank's last progress."""
    is_stopped: bool = False
    """For `rank_stalled`: a signal or a debugger holds the rank; no other rank is the reason."""
    is_fatal: bool = True
    """For `rank_stalled`: it may end the round; False with `--no-restart-on-stall`."""
    entered: Int | None = None
    """For `rank_stalled`, where the rank is in no collective: the number of the last collective of
    all ranks that it has entered; None if that is not known. Older releases read it."""
    entered_in: tuple[GroupPosition, ...] = ()
    """For `rank_stalled`, where the rank is in no collective: how far it has come in each
    process group, as far as that is known."""
    excuse_s: float | None = None
    """For `excused`: how much longer the rank that may be the reason can go on before it has
    stalled itself."""
    step_s: float | None = None
    """For `reached`: the duration of a step."""
    instance: Name = ""
    """The agent's own id, as in `join`: a report by another agent about the slot is refused."""
    warm_ranks: Int = 0
    """For `started`: how many ranks were forked from a warm process."""
    restore_s: float = 0.0
    """For `first_step`: how long the ranks took to restore their state."""
    heal_s: float = 0.0
    """For `first_step`: how long it took until all had their states, where some had kept theirs."""
    healed: str = ""
    """For `first_step`: the sentence of that `state_healed`."""
    survives: Count = 0
    """For `first_step`: 1 if the ranks survive rounds, 2 if a node may be lost with its ranks, as
    each part of the state is on another one, too."""
    is_of_code: bool = False
    """For `rank_exited`: the kind of the exception says that the program is wrong."""
    asks: Name = ""
    """For `rank_exited`: as in `error_record`."""
    check: Name = ""
    """For `check_failed`, `check_recovered` and `check_compared`: the check."""
    check_state: Name = ""
    """For `check_compared`: the state of the check, as in `check_result`."""
    policy: Name = ""
    """For `check_failed`: `end_round` or `exclude`."""
    injected_by: Name = ""
    """Who made a fault in the rank before, where `reason` names them."""


class Reported(Reply, frozen=True, kw_only=True, tag="reported.v1"):
    """The meaning of a report for the round."""

    round: Count
    """The newest round."""
    is_current: bool
    """The report was about the newest round; otherwise it changed nothing."""
    incident: Name | None = None
    """The incident that the report opened or joined."""
    phase: Name = ""
    """The round's phase from now on."""
    cause: str = ""
    """For `rank_stalled`: what the rank waits for, as far as anybody knows."""
    weight: Int = 0
    """How well `cause` explains the stall, as in `stop_ranks`: 1 if it may be the cause, more if it
    is."""


class ShowRound(Question, frozen=True, kw_only=True, tag="show_round.v1"):
    """What is the state of the job? Anyone asks. The answer is a `RoundDocument`."""


class StopJob(Question, frozen=True, kw_only=True, tag="stop_job.v1"):
    """End the job. An operator asks, or an agent whose script wants it.

    The answer `Done` means that the end is decided, not that all has stopped.
    """

    by: Name
    """The person, as authenticated; or `rank 3 of node-1`."""
    reason: str
    """Why."""
    save_first: bool = True
    """Save at the next step boundary before stopping."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `script`; `numerics` for a result that cannot be right."""


class RestartJob(Question, frozen=True, kw_only=True, tag="restart_job.v1"):
    """End the round and form another. An operator asks, or a service in enforce mode."""

    by: Name
    """The person or service."""
    reason: str
    """Why."""
    round: Count
    """The round that they want to end: rendezvous touches no other round."""
    without_nodes: tuple[Name, ...] = ()
    """Nodes that must not have a slot in the next round."""
    save_first: bool = False
    """Save at the next step boundary before stopping."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `script`; `numerics` for a result that cannot be right."""


class RequestSave(Question, frozen=True, kw_only=True, tag="request_save.v1"):
    """Save at the next step boundary. An operator asks; the answer is `Done` when ordered."""

    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class DrainNode(Question, frozen=True, kw_only=True, tag="drain_node.v1"):
    """Let a node leave without loss: replace it after a save.

    An operator or health asks, or the node's agent when its script wants it.
    """

    node: Name
    """The node."""
    by: Name
    """The person or service; or `rank 3 of node-1`."""
    reason: str
    """Why."""
    within_s: float | None = None
    """After this time the node leaves without a save."""
    origin: Name = ""
    """The interface: `rest`, `cli` or `script`; `numerics` for a result that cannot be right."""


class RequestEvidence(Question, frozen=True, kw_only=True, tag="request_evidence.v1"):
    """Let agents collect evidence of ranks that keep running. Evidence comes as facts.

    Attribution asks about an incident; an operator asks for a capture of a healthy round.
    """

    incident: Name
    """The incident that the evidence belongs to, or `capture-` and the id of the capture."""
    evidence: tuple[str, ...]
    """The kinds of evidence, as in `evidence_collected`."""
    within_s: float
    """How long to collect; the rest is reported as missing."""
    nodes: tuple[Name, ...] = ()
    """Only from these nodes; empty for all."""
    ranks: tuple[Int, ...] = ()
    """Only from these global ranks; empty for all ranks of the nodes."""
    reason: str = ""
    """Why."""
    round: Count = 0
    """The round; 0 for the round that runs."""
    by: Name = "attribution"
    """The person, as authenticated, or the service."""
    origin: Name = ""
    """The interface: `rest` or `cli`; empty for a service."""


class RequestChecks(Question, frozen=True, kw_only=True, tag="request_checks.v1"):
    """Let nodes be examined. Health or an operator asks rendezvous; results come as facts."""

    nodes: tuple[Name, ...]
    """The nodes."""
    by: Name
    """The person or service."""
    reason: str
    """Why."""
    checks: tuple[str, ...] = ()
    """The checks to run; empty for all that may run during a training."""
    origin: Name = ""
    """The interface: `rest` or `cli`; empty for a service."""


class RequestMeasurement(Question, frozen=True, kw_only=True, tag="request_measurement.v1"):
    """Let nodes measure the network between them. An operator asks rendezvous.

    The figures come as facts, a `network_measured` for each node.
    """

    test: str
    """The id of the test, made by the caller."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    nodes: tuple[Name, ...] = ()
    """The nodes; empty for all nodes of the job."""
    partners: Int = 8
    """The largest number of other nodes with which each node measures."""
    is_beside_training: bool = False
    """Also measure on nodes whose ranks run, which slows the ranks."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class RequestRelease(Question, frozen=True, kw_only=True, tag="request_release.v1"):
    """Let quarantined states in the memory of nodes be restored again. The catalog asks rendezvous.

    The catalog records the person who wants it; each node reports what was released as a fact.
    """

    step: Count
    """The step."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""


class RequestCopy(Question, frozen=True, kw_only=True, tag="request_copy.v1"):
    """Let a node send a slot's state to another node. The catalog asks rendezvous, to repair."""

    round: Count
    """The round."""
    owner_slot: Count
    """The slot whose state it is."""
    step: Count
    """The step."""
    holder: Name
    """The node that sends the state."""
    to: str
    """The node that receives the state."""
    reason: str
    """Why."""
