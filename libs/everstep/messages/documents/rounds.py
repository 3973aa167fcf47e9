"""The document of a job in `ROUNDS`: its newest round, and all that rendezvous knows of it."""

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.health import NetworkFigures
from everstep.messages.facts.incidents import Budget, Ledger
from everstep.messages.facts.jobs import JobSpec
from everstep.messages.facts.rounds import Member
from everstep.messages.orders import GroupPosition, MeasureNetwork


class Seat(Part, frozen=True, kw_only=True, array_like=True):
    """A node that has joined, with or without a slot, as an array in the order of its fields.

    An array, because 12,500 of them must fit into one document of 1 MiB.
    """

    node: Name
    """The node."""
    slot: Count | None
    """The node's slot in this round; None for a spare and while the round forms."""
    ranks: Count
    """How many ranks the node can run."""
    address: Name
    """The host name or IP address at which other nodes reach the node."""
    infra_rank: Int | None = None
    """The node's place by the scheduler or by an option."""
    place: str = ""
    """Failure domain and topology, outermost first, as one path: `block-3/rack-12`. In a job with
    replacement groups the node's group."""
    last_slot: Int | None = None
    """The slot that the node held last."""
    replica_port: Int | None = None
    """The port of the node's replica server."""
    warm: bool = False
    """The node has a process that has already imported the script's modules."""
    stage: Name = "idle"
    """`idle` (joined, no ranks), `starting` (ordered to start them), `running`, `finished` (all
    ranks exited with 0), `stopping` (ordered to stop, and not back yet), `absent` (not back in
    time) or `gone` (only its slot is still remembered)."""
    instance: Name = ""
    """The agent's own id: a process with another id is another agent."""
    allocation: Name = ""
    """The node's allocation; empty for that of the document."""
    failure_domain: Name = ""
    """As in `node_joined`."""
    master_port: Int | None = None
    """A port that the node keeps free, at which ranks can meet."""
    is_leaving: bool = False
    """The node should be replaced: it was drained, or is about to be taken away."""
    leaves_because: str = ""
    """Why `is_leaving`, in at most 200 characters."""


class FirstCause(Part, frozen=True, kw_only=True):
    """The report that is the cause of an incident; its fields are those of `OpenIncident`."""

    trigger: Name
    """As in `OpenIncident`."""
    reason: str
    """As in `OpenIncident`."""
    weight: Int = 0
    """As in `OpenIncident`."""
    node: Name | None = None
    """As in `OpenIncident`."""
    rank: Count | None = None
    """As in `OpenIncident`."""
    trigger_fact: Name | None = None
    """As in `OpenIncident`."""
    injected_by: Name = ""
    """As in `OpenIncident`."""


class OpenIncident(Part, frozen=True, kw_only=True):
    """The incident that is open, and what is needed to close it."""

    id: Name
    """The incident's id."""
    trigger: Name
    """As in `incident_opened`, of the report that counts as the cause."""
    reason: str
    """The reason in that report."""
    opened_at: Time
    """When the first report came."""
    round: Count
    """The round that the incident ended."""
    counted_until: Time
    """The time up to which the ledger counts."""
    ledger: Ledger
    """Where the time went so far."""
    node: Name | None = None
    """The node that the cause is about."""
    rank: Count | None = None
    """The rank that the cause is about."""
    fingerprint: str = ""
    """The fingerprint of the cause."""
    exit_code: Int | None = None
    """The exit code of the rank that is the cause."""
    weight: Int = 0
    """How well the cause explains the other reports; a report with a larger weight replaces it."""
    trigger_fact: Name | None = None
    """The id of the cause's fact."""
    reports: Int = 1
    """How many reports belong to the incident."""
    ranks: Count = 0
    """How many ranks the reports are about."""
    unsaid: tuple[str, ...] = ()
    """Facts of reports that no `incident_extended` has named yet, at most 100."""
    unsaid_nodes: tuple[Name, ...] = ()
    """The nodes that those facts are about."""
    lost: tuple[Name, ...] = ()
    """The nodes that were lost together, at most 100."""
    is_decided: bool = False
    """It is decided what follows the latest end of a round."""
    delay_s: float = 0.0
    """How long the next round waits."""
    is_of_code: bool = False
    """The kind of the exception that is the cause says that the program is wrong."""
    asks: Name = ""
    """As in the report that is the cause: `move` or `stop`."""
    evidence_s: float = 0.0
    """The longest time that a node needed for its evidence."""
    stop_s: float = 0.0
    """The longest time that a node needed until its ranks were gone."""
    check: Name = ""
    """The check, if the cause is a failed check."""
    accused: tuple[Name, ...] = ()
    """The nodes on which that check fails, at most 16."""
    stalled: tuple[Count, ...] = ()
    """The ranks that stand still in its round, which goes on: their stalls are only observed."""
    injected_by: Name = ""
    """As in the report that is the cause."""
    first: FirstCause | None = None
    """The cause of its round, where a later round has ended, too, and explains no more."""


class OpenDecision(Part, frozen=True, kw_only=True):
    """A decision whose action has not finished."""

    id: Name
    """The id of the `action_decided`."""
    action: Name
    """The action."""
    decided_at: Time
    """When it was decided."""
    incident: Name | None = None
    """The incident that the action answers, if any."""


class PlannedEnd(Part, frozen=True, kw_only=True):
    """A planned end of the round, which waits until the ranks have had time to save."""

    cause: Name
    """As in `round_ended`."""
    reason: str
    """Why, and who asked."""
    within_s: float
    """How long to wait."""
    node: Name | None = None
    """The node for whose sake the round ends."""
    exit_code: Int | None = None
    """The exit code of agents after this end; None when another round follows."""


class AgreedSave(Part, frozen=True, kw_only=True):
    """A save of all ranks after the same step, and how far it is."""

    id: Name
    """The id of the order."""
    reason: str
    """Why, and who asked."""
    occasion: Name
    """As in `save_checkpoint`."""
    within_s: float | None = None
    """As in `save_checkpoint`."""
    then_stop: bool = False
    """As in `save_checkpoint`."""
    then_leave: bool = False
    """As in `save_checkpoint`."""
    answered: str = ""
    """The slots that have reported their step, as the bits of a hexadecimal number."""
    furthest: Int | None = None
    """The first step that no rank can have finished before the order arrives."""
    after_step: Int | None = None
    """The step that was agreed on; 0 for at once, where nobody counts steps."""
    plan: str = ""
    """As in `preemption_planned`, once that was sent."""
    has_stopped: bool = False
    """Ranks have ended because the agent asked them to."""


class OpenStall(Part, frozen=True, kw_only=True):
    """A rank that has stalled, unless another rank is the reason."""

    id: Name
    """The id of the order that asks for excuses."""
    node: Name
    """The rank's node."""
    rank: Count | None
    """The rank."""
    reason: str
    """The report of the rank's agent."""
    waited_s: float
    """How long the rank had made no progress at the time of that report."""
    fact: str | None = None
    """The id of the stall's fact."""
    fingerprint: str = ""
    """The fingerprint of the stall."""
    step: Count | None = None
    """The last step that the node's ranks had finished."""
    entered: Int | None = None
    """As in `report`."""
    entered_in: tuple[GroupPosition, ...] = ()
    """As in `report`."""
    span: str
    """A value that changes with each excuse, and when an excuse is over: a replica then starts its
    timer anew."""
    excused_s: float = 0.0
    """How long nothing is decided; 0 without an excuse."""
    excuse: str = ""
    """The rank that may be the reason."""
    is_fatal: bool = True
    """As in `report`."""
    injected_by: Name = ""
    """As in `report`."""


class CheckAccusation(Part, frozen=True, kw_only=True):
    """A node whose probe has failed, and whose policy wants another round."""

    node: Name
    """The node."""
    slot: Count
    """The slot of that node."""
    reason: str
    """What the node's agent has measured."""
    policy: Name
    """`end_round` or `exclude`."""
    fact: str | None = None
    """The fact about the failure."""


class OpenCheck(Part, frozen=True, kw_only=True):
    """A check that has failed on nodes of the round, while other nodes run the same check.

    A check that fails on all nodes accuses none of them: something that they share has failed.
    """

    id: Name
    """The id of the order that asks the other nodes."""
    check: Name
    """The check."""
    accused: tuple[CheckAccusation, ...] = ()
    """The nodes that have reported the failure, at most 16."""
    failed: str = ""
    """The slots on which the check fails, as the bits of a hexadecimal number."""
    passed: str = ""
    """The slots on which the check passes."""
    is_shared: bool = False
    """It was decided that the round continues; the nodes are asked again after some minutes."""
    spares_failed: tuple[Name, ...] = ()
    """The spares on which the check fails, of the first 32."""
    spares_passed: tuple[Name, ...] = ()
    """The spares on which the check passes, of the first 32."""


class OpenNetworkTest(Part, frozen=True, kw_only=True):
    """A network test before a round forms, and what nodes have told so far."""

    order: MeasureNetwork
    """The order to the nodes."""
    round: Count
    """The round that waits for it."""
    figures: tuple[NetworkFigures, ...] = ()
    """Of the nodes that have answered."""
    is_over: bool = False
    """The figures were judged: the round may form."""
    doubted: tuple[Name, ...] = ()
    """Nodes that get a slot of this round only where no other node can have it."""

    def __repr__(self) -> str:
        return f"OpenNetworkTest(order={self.order!r}, round={self.round}, over={self.is_over})"


class Replication(Part, frozen=True, kw_only=True):
    """How the states of slots are kept in the memory of other nodes."""

    key: str
    """The secret by which agents of the job authenticate to each other."""
    factor: Int = 0
    """How many nodes hold a slot's state or a part of it, its own node included; 0 while none
    does."""
    parts_needed: Count = 1
    """How many parts restore a state; 1 where each holder has all of it."""
    cliques: tuple[Int, ...] = ()
    """For each slot the number of its group of nodes that hold states for each other; -1 for
    none."""
    before: tuple[Int, ...] = ()
    """The same in the previous round, where it was different."""

    def __repr__(self) -> str:
        return f"Replication(key='***', factor={self.factor}, parts_needed={self.parts_needed})"


class RoundDocument(DocumentBody, frozen=True, kw_only=True, tag="round_document.v1"):
    """All that rendezvous knows about a job: any replica can continue from it.

    Key: the job. Its times are for people; a replica that takes over starts its timers anew.
    """

    job: Name
    """The job."""
    round: Count
    """The newest round, 0 before the first: the fencing token of everything about this job."""
    phase: Name
    """`joining`, `forming`, `running`, `ending`, `done` or `stopped`."""
    spec: JobSpec
    """The specification of the job."""
    allocation: Name
    """The allocation whose nodes run the job."""
    phase_since: Time
    """When the phase began, for people."""
    reason: str = ""
    """Why the round is in this phase."""
    seats: tuple[Seat, ...] = ()
    """Every node that has joined, and those that left a slot which no other node has yet."""
    former: tuple[Name, ...] = ()
    """Nodes that no longer have a seat, the latest at the end: the newest 1024, or as many as
    the round has slots. They stay when the job is over."""
    slots: Int = 0
    """The number of slots of this round."""
    world_size: Count = 0
    """The number of ranks in this round."""
    master_address: str = ""
    """The address at which the ranks meet."""
    master_port: Int = 0
    """The port at which the ranks meet."""
    start_order: str = ""
    """The id of the order that began this round."""
    stop_order: str = ""
    """The id of the order that ended this round."""
    warm_ranks: Int = 0
    """How many ranks of the round were forked from a warm process."""
    has_stepped: bool = False
    """The round has made its first step."""
    has_ever_stepped: bool = False
    """Some round of the job has made a step."""
    is_mendable: bool = False
    """The job was stopped because its script cannot start: another allocation tries it again."""
    first_step: Int | None = None
    """The step after which the training continued in this round."""
    restore_s: float = 0.0
    """How long the ranks took to restore their state."""
    heal_s: float = 0.0
    """How long it took until all had their states, where some had kept theirs."""
    healed: str = ""
    """What became of the ranks and their states then."""
    survives: Count = 0
    """As in `report`, of this round."""
    are_kept: bool = False
    """As in `stop_ranks`, of the last order."""
    round_step: Int | None = None
    """The highest step of this round, as far as agents have reported."""
    reached_step: Count | None = None
    """The step that the training had reached when the last round with steps ended, if the script
    numbers them."""
    incident: OpenIncident | None = None
    """The incident that is open, if any."""
    end_reason: str = ""
    """Why the last round that ended did: what agents show, until a better reason is known."""
    planned: PlannedEnd | None = None
    """How the round is going to end, once the ranks had time to save."""
    saving: AgreedSave | None = None
    """The save that is being agreed on, or was ordered."""
    stalls: tuple[OpenStall, ...] = ()
    """Ranks that have stalled, and may have an excuse."""
    checks: tuple[OpenCheck, ...] = ()
    """Checks that have failed, and are compared between nodes."""
    network: OpenNetworkTest | None = None
    """The network test for which the next round waits, or has waited."""
    replication: Replication | None = None
    """Which nodes hold whose states; None before the first round."""
    decisions: tuple[OpenDecision, ...] = ()
    """Decisions that no `action_taken` has closed yet."""
    restarts: Count = 0
    """Restarts that count against the budget."""
    refilled: Int = 0
    """How many of these restarts count no longer, because the training made progress."""
    recent: tuple[Int, ...] = ()
    """The numbers of the restarts that may lie within the last hour."""
    quick_failures: Int = 0
    """Rounds in a row that failed soon and without progress."""
    idle_rounds: Int = 0
    """Rounds in a row that ended without a new step."""
    is_moved: bool = False
    """Ranks have moved to other nodes because they asked for it, and made no new step since."""
    budgets: tuple[Budget, ...] = ()
    """The rest of each limit."""
    last_step: Count | None = None
    """The highest step of all earlier rounds."""
    fingerprints: tuple[str, ...] = ()
    """The fingerprints of the latest failures, the newest last, at most 10."""
    allocations: tuple[str, ...] = ()
    """The allocations whose agents are here."""
    waiting: str = ""
    """The last reported reason why no round forms."""
    refused: tuple[str, ...] = ()
    """`node cause` of each refusal that is on record, at most 1000."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
    exit_code: Int | None = None
    """The exit code of agents once the job is done or stopped."""

    @property
    def nodes(self) -> frozenset[str]:
        """Every node that takes part in the job, or took part as far as that is remembered."""
        return frozenset((*(seat.node for seat in self.seats), *self.former))

    @property
    def members(self) -> tuple[Member, ...]:
        """Who has which slot of this round; empty while not all slots are held."""
        held = {seat.slot: seat for seat in self.seats if seat.slot is not None}
        if len(held) != self.slots:
            return ()
        members, rank = [], 0
        for slot in sorted(held):
            seat = held[slot]
            members.append(Member(slot=slot, node=seat.node, first_rank=rank, ranks=seat.ranks))
            rank += seat.ranks
        return tuple(members)
