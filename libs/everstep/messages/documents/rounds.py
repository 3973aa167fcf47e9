"""The document of a job in `ROUNDS`: its newest round, and all that rendezvous knows of it."""

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.incidents import Budget, Ledger
from everstep.messages.facts.jobs import JobSpec
from everstep.messages.facts.rounds import Member


class Seat(Part, frozen=True, kw_only=True, array_like=True):
    """A node that has joined, with or without a slot, as an array in the order of its fields.

    An array, because 12,500 of them must fit into one document of 1 MiB.
    """

    node: Name
    """The node."""
    slot: Count | None
    """Its slot in this round; None for a spare and while the round forms."""
    ranks: Count
    """How many processes it can run."""
    address: Name
    """Where other nodes reach it."""
    infra_rank: Int | None = None
    """Its place by the scheduler or by explicit wish."""
    place: str = ""
    """Failure domain and topology, outermost first, as one path: `block-3/rack-12`. In a job with
    replacement groups the node's group."""
    last_slot: Int | None = None
    """The slot that it held last."""
    replica_port: Int | None = None
    """Where its replica server listens."""
    warm: bool = False
    """It holds a process that has imported the script's modules already."""
    stage: Name = "idle"
    """`idle` (joined, no ranks), `starting` (ordered to), `running`, `finished` (all ranks exited
    with 0), `stopping` (ordered to, and not back yet), `absent` (it did not come back in time) or
    `gone` (only its slot is still remembered)."""
    instance: Name = ""
    """The agent's own id: a process with another id is another agent."""
    allocation: Name = ""
    """The allocation that it came with; empty for the document's."""
    failure_domain: Name = ""
    """What fails together with it."""
    master_port: Int | None = None
    """A port that it keeps free, for ranks to meet at."""
    is_leaving: bool = False
    """It should be replaced: it was drained, or is about to be taken away."""


class OpenIncident(Part, frozen=True, kw_only=True):
    """The incident that is open, and what its end will need."""

    id: Name
    """The incident's id."""
    trigger: Name
    """As in `incident_opened`, of the report that is taken for the cause."""
    reason: str
    """The reason in that report."""
    opened_at: Time
    """When the first report came."""
    round: Count
    """The round that it ended."""
    counted_until: Time
    """How far the ledger goes."""
    ledger: Ledger
    """Where the time went so far."""
    node: Name | None = None
    """The node that the cause is about."""
    rank: Count | None = None
    """The rank that the cause is about."""
    fingerprint: str = ""
    """Of the cause."""
    exit_code: Int | None = None
    """The rank's, of the cause."""
    weight: Int = 0
    """How well the cause explains the others; a weightier report takes its place."""
    trigger_fact: Name | None = None
    """The cause's fact."""
    reports: Int = 1
    """How many reports belong to it."""
    ranks: Count = 0
    """How many ranks they are about."""
    unsaid: tuple[str, ...] = ()
    """Facts of reports that no `incident_extended` has named yet, at most 100."""
    unsaid_nodes: tuple[Name, ...] = ()
    """The nodes that those are about."""
    is_decided: bool = False
    """What to do about the latest end of a round is settled."""
    delay_s: float = 0.0
    """How long the next round waits."""
    is_of_code: bool = False
    """The kind of the exception that is the cause says that the program is wrong."""
    evidence_s: float = 0.0
    """The longest that any node took for its evidence."""
    stop_s: float = 0.0
    """The longest that any node took until its ranks were gone."""
    check: Name = ""
    """The check, if the cause is a failed check."""
    accused: tuple[Name, ...] = ()
    """The nodes on which that check fails, at most 16."""


class OpenDecision(Part, frozen=True, kw_only=True):
    """A decision whose action has not finished."""

    id: Name
    """The id of the `action_decided`."""
    action: Name
    """As it says."""
    decided_at: Time
    """When."""
    incident: Name | None = None
    """The incident that it answers, if any."""


class PlannedEnd(Part, frozen=True, kw_only=True):
    """An end of the round that waits until the ranks had time to save."""

    cause: Name
    """As in `round_ended`."""
    reason: str
    """Why, and who asked."""
    within_s: float
    """How long to wait."""
    node: Name | None = None
    """The node that it is for."""
    exit_code: Int | None = None
    """What agents then exit with; None for another round."""


class AgreedSave(Part, frozen=True, kw_only=True):
    """A save of all ranks after the same step, as far as it has come."""

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
    """The slots that have said how far they are, as the bits of a hexadecimal number."""
    furthest: Int | None = None
    """The first step that none of them can have finished before the order is there."""
    after_step: Int | None = None
    """The step that was agreed on; 0 for at once, where nobody counts steps."""
    plan: str = ""
    """As in `preemption_planned`, once that was sent."""
    has_stopped: bool = False
    """Ranks have ended because the agent asked them to."""


class OpenStall(Part, frozen=True, kw_only=True):
    """A rank that has stalled, unless another one excuses it."""

    id: Name
    """The id of the order that asks for excuses."""
    node: Name
    """The rank's node."""
    rank: Count | None
    """The rank."""
    reason: str
    """The report of its agent."""
    waited_s: float
    """For how long it had made no progress at that report."""
    fact: str | None = None
    """The stall's fact."""
    fingerprint: str = ""
    """Of the stall."""
    step: Count | None = None
    """The last step that the node's ranks had finished."""
    entered: Int | None = None
    """As in `report`."""
    span: str
    """Changes with each excuse, and when one is over: for each, a replica starts its clock anew."""
    excused_s: float = 0.0
    """For how long nothing is decided; 0 without an excuse."""
    excuse: str = ""
    """Which rank it may wait for."""


class CheckAccusation(Part, frozen=True, kw_only=True):
    """A node whose probe has failed, and whose policy wants another round."""

    node: Name
    """The node."""
    slot: Count
    """Its slot."""
    reason: str
    """What its agent has measured."""
    policy: Name
    """`end_round` or `exclude`."""
    fact: str | None = None
    """The fact about the failure."""


class OpenCheck(Part, frozen=True, kw_only=True):
    """A check that has failed on nodes of the round, while other nodes run the same check.

    A check that fails on all nodes accuses none: what they share has failed.
    """

    id: Name
    """The id of the order that asks the other nodes."""
    check: Name
    """The check."""
    accused: tuple[CheckAccusation, ...] = ()
    """The nodes that have reported the failure, at most 16."""
    failed: str = ""
    """The slots on which it fails, as the bits of a hexadecimal number."""
    passed: str = ""
    """The slots on which it passes."""
    is_shared: bool = False
    """It was decided that the round goes on; asked again after some minutes."""
    spares_failed: tuple[Name, ...] = ()
    """The spares on which it fails, of the first 32."""
    spares_passed: tuple[Name, ...] = ()
    """The spares on which it passes, of the first 32."""


class Replication(Part, frozen=True, kw_only=True):
    """How the states of slots are kept in the memory of other nodes."""

    key: str
    """What agents of the job prove to each other that they have. Secret."""
    factor: Int = 0
    """Nodes that have to do with a slot's state, its own included; 0 while none keeps any."""
    parts_needed: Count = 1
    """How many parts give a state back; 1 where each holder has all of it."""
    cliques: tuple[Int, ...] = ()
    """For each slot the number of its clique, -1 for none."""
    before: tuple[Int, ...] = ()
    """The same in the round before, where it was different."""

    def __repr__(self) -> str:
        return f"Replication(key='***', factor={self.factor}, parts_needed={self.parts_needed})"


class RoundDocument(DocumentBody, frozen=True, kw_only=True, tag="round_document.v1"):
    """All that rendezvous knows about a job: any replica can continue from it.

    Key: the job. Times in it are for people; a replica that takes over starts its timers
    anew.
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
    """The allocation that it runs in."""
    phase_since: Time
    """When the phase began, for people."""
    reason: str = ""
    """Why it is in this phase."""
    seats: tuple[Seat, ...] = ()
    """Every node that has joined, and those whose slot is not given to another yet."""
    former: tuple[Name, ...] = ()
    """Nodes that no longer have a seat, the latest at the end: the newest 1024, or as many as
    the round has slots. They stay when the job is over."""
    slots: Int = 0
    """Slots of this round."""
    world_size: Count = 0
    """Ranks in this round."""
    master_address: str = ""
    """Where the ranks meet."""
    master_port: Int = 0
    """The port there."""
    start_order: str = ""
    """The id of the order that began this round."""
    stop_order: str = ""
    """The id of the order that ended it."""
    warm_ranks: Int = 0
    """How many of its ranks were forked from a warm process."""
    has_stepped: bool = False
    """It has made its first step."""
    has_ever_stepped: bool = False
    """Some round of the job has made a step."""
    is_mendable: bool = False
    """It was stopped since its script cannot start: another allocation tries it again."""
    first_step: Int | None = None
    """The step after which it continued."""
    restore_s: float = 0.0
    """How long its ranks took to have their state back."""
    round_step: Int | None = None
    """The highest step that it reached, as far as agents have reported."""
    incident: OpenIncident | None = None
    """The incident that is open, if any."""
    planned: PlannedEnd | None = None
    """How the round is going to end, once the ranks had time to save."""
    saving: AgreedSave | None = None
    """The save that is being agreed on, or was ordered."""
    stalls: tuple[OpenStall, ...] = ()
    """Ranks that have stalled, and may have an excuse."""
    checks: tuple[OpenCheck, ...] = ()
    """Checks that have failed, and are compared between nodes."""
    replication: Replication | None = None
    """Who keeps whose state; None before the first round."""
    decisions: tuple[OpenDecision, ...] = ()
    """Decisions that no `action_taken` has closed yet."""
    restarts: Count = 0
    """Restarts that count against the budget."""
    refilled: Int = 0
    """How many of them progress has given back."""
    recent: tuple[Int, ...] = ()
    """The numbers of the restarts that may lie within the last hour."""
    quick_failures: Int = 0
    """Rounds in a row that failed soon and without progress."""
    idle_rounds: Int = 0
    """Rounds in a row that ended without a new step."""
    budgets: tuple[Budget, ...] = ()
    """What is left of each limit."""
    last_step: Count | None = None
    """The highest step that any round before this one reached."""
    fingerprints: tuple[str, ...] = ()
    """Of the latest failures, the newest last, at most 10."""
    allocations: tuple[str, ...] = ()
    """Those whose agents are here."""
    waiting: str = ""
    """The reason sent last for why no round forms."""
    refused: tuple[str, ...] = ()
    """`node cause` of each refusal that is on record, at most 1000."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
    exit_code: Int | None = None
    """Once it is done or stopped: what agents exit with."""

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
