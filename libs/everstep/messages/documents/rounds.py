"""What the buckets hold: the rounds, the limits and the switches that are in force."""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.documents.cases import Case, NodeSign, PastIncident, SlowRankSign
from everstep.messages.facts.health import SectionLimit
from everstep.messages.facts.incidents import Budget, Ledger
from everstep.messages.facts.jobs import JobSpec
from everstep.messages.documents.checkpoints import Holding, KnownCheckpoint
from everstep.messages.facts.rounds import Member
from everstep.messages.documents.health import NodeRecord


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
    """Failure domain and topology, outermost first, as one path: `block-3/rack-12`."""
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
    """The agent's own id: whoever comes with another one is somebody else."""
    allocation: Name = ""
    """The allocation that it came with; empty for the document's."""
    failure_domain: Name = ""
    """What fails together with it."""
    master_port: Int | None = None
    """A port that it keeps free, for ranks to meet at."""
    is_leaving: bool = False
    """It is to be replaced: drained, or about to be taken away."""


class OpenIncident(Part, frozen=True, kw_only=True):
    """The incident that is open, and what its end will need."""

    id: Name
    """The incident's id."""
    trigger: Name
    """As in `incident_opened`, of the report that is taken for the cause."""
    reason: str
    """What that report said."""
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


class OpenDecision(Part, frozen=True, kw_only=True):
    """What was decided, and has not come to its end."""

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
    """As in `preemption_planned`, once that was said."""
    has_stopped: bool = False
    """Ranks have ended because they were told to."""


class OpenStall(Part, frozen=True, kw_only=True):
    """A rank that has stalled, unless another one excuses it."""

    id: Name
    """The id of the order that asks for excuses."""
    node: Name
    """The rank's node."""
    rank: Count | None
    """The rank."""
    reason: str
    """What its agent said."""
    waited_s: float
    """For how long it had made no progress when that was heard."""
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
    """All that rendezvous knows about a job: any replica can go on from it.

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
    """What the job is meant to be."""
    allocation: Name
    """The allocation that it runs in."""
    phase_since: Time
    """When the phase began, for people."""
    reason: str = ""
    """Why it is in this phase."""
    seats: tuple[Seat, ...] = ()
    """Every node that has joined, and those whose slot is not given to another yet."""
    former: tuple[Name, ...] = ()
    """Nodes that have a seat no more, whoever left last at the end: the newest 1024, or as many as
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
    """The step after which it went on."""
    restore_s: float = 0.0
    """How long its ranks took to have their state back."""
    round_step: Int | None = None
    """The highest step that it reached, as far as it was said."""
    incident: OpenIncident | None = None
    """The incident that is open, if any."""
    planned: PlannedEnd | None = None
    """How the round is going to end, once the ranks had time to save."""
    saving: AgreedSave | None = None
    """The save that is being agreed on, or was ordered."""
    stalls: tuple[OpenStall, ...] = ()
    """Ranks that have stalled, and may have an excuse."""
    replication: Replication | None = None
    """Who keeps whose state; None before the first round."""
    decisions: tuple[OpenDecision, ...] = ()
    """What no `action_taken` has told the end of."""
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
    """What was said last about why no round forms."""
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


class LimitsDocument(DocumentBody, frozen=True, kw_only=True, tag="limits_document.v1"):
    """Past which limits a job's ranks have stalled; health writes it, agents read it.

    Key: the job.
    """

    job: Name
    """The job."""
    limits: tuple[SectionLimit, ...]
    """One for each section that has been seen, and for the time outside all."""
    first_step_limit_s: float
    """For everything up to the end of a round's first step."""
    reason: str
    """The rule, and the numbers that went into it."""
    round: Count | None = None
    """The round whose observations are the latest in it."""
    config_fingerprint: str = ""
    """The configuration that they were learned for: another one begins anew."""
    first_step_longest_s: float | None = None
    """How long a first step took, the base of its limit; None until one was seen."""


class KnownStraggler(Part, frozen=True, kw_only=True):
    """A slow rank that was found, and not cleared yet."""

    finding: Name
    """The id of its `straggler_found`."""
    round: Count
    """The round."""
    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    slot: Count
    """The node's slot."""
    found_at: Time
    """When it was found."""
    last_step: Count = 0
    """The end of the window in which it was found."""
    cause: Name
    """As in `straggler_found`."""
    reason: str
    """As in `straggler_found`."""
    lost_s: float = 0.0
    """What the job loses by it in a step."""
    slower_ratio: float = 0.0
    """How much longer it needs than the median of its role group: 0.1 for 10 %."""
    slowdown_ratio: float | None = None
    """How much faster the whole job would be without it: 0.12 for 12 %."""
    confidence: float | None = None
    """As in `straggler_found`."""
    lost_so_far_s: float = 0.0
    """What the job lost by it, up to `counted_step`: the sum over windows of what each cost."""
    counted_step: Count = 0
    """The last step that is counted in `lost_so_far_s`; 0 where an older release found it."""
    acted: tuple[str, ...] = ()
    """What the policy has decided about it, as in `straggler_acted`: `stop`, `exclude`."""


class StragglersDocument(DocumentBody, frozen=True, kw_only=True, tag="stragglers_document.v1"):
    """Which ranks of a job are slow, and how agents measure; straggler writes it.

    Key: the job. Agents follow it for `is_on`, `window_steps` and `is_cpu_timed`.
    """

    job: Name
    """The job."""
    is_on: bool
    """Agents send timings."""
    window_steps: Count
    """So many steps are one window: windows begin after multiples of it."""
    is_cpu_timed: bool = True
    """The SDK measures the processor time of sections, too."""
    round: Count | None = None
    """The round that `found` is about."""
    found: tuple[KnownStraggler, ...] = ()
    """The slow ranks, by rank; at most 1,000."""
    shifted_step: Count = 0
    """The step of the latest `step_time_shifted` of the round; 0 for none."""
    reason: str = ""
    """Why it was written last."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""


class Exclusion(Part, frozen=True, kw_only=True):
    """A node that may not join."""

    node: Name
    """The node."""
    by: Name
    """Who decided."""
    reason: str
    """Why."""
    until: Time | None = None
    """When it ends, by the wall clock of whoever decides; None for no end."""


class ControlDocument(DocumentBody, frozen=True, kw_only=True, tag="control_document.v1"):
    """The switches that are in force; operators and health write it, everybody follows it.

    Key: the job, or `everstep.subjects.CLUSTER` for all. What a job's document does not
    say, the cluster's says; the brake holds if either has it on.
    """

    settings: Mapping[str, str]
    """Changed at run time, by dotted name: `{"catalog.keep_last": "5"}`."""
    changed_by: str
    """Who wrote it last."""
    reason: str
    """Why."""
    is_braked: bool = False
    """The global brake: every actuator only observes."""
    braked_by: str = ""
    """Who pulled the brake, while it is on."""
    brake_reason: str = ""
    """Why, whatever else was changed after it."""
    modes: Mapping[str, str]
    """`observe` or `enforce` by actuator: `stop`, `exclude`, `restart`, `replace`, `shrink`."""
    exclusions: tuple[Exclusion, ...] = ()
    """Nodes that may not join."""


class NodesDocument(DocumentBody, frozen=True, kw_only=True, tag="nodes_document.v1"):
    """All that health remembers of nodes: any replica can go on from it.

    Key: `everstep.subjects.CLUSTER`. How far the facts were read is written together with
    what they came to.
    """

    nodes: tuple[NodeRecord, ...] = ()
    """Every node that was examined, or that something speaks against."""
    stream: str = ""
    """The incarnation of the stream of facts that was read."""
    sequence: Int = 0
    """How far it was read."""
    distrusted: tuple[str, ...] = ()
    """Checks that fail on so many nodes that they count against nobody."""
    breaker_opened_at: Time | None = None
    """Since when health excludes no more nodes by itself; None while it may."""
    breaker_closed_at: Time | None = None
    """What was excluded before counts no more: an operator closed the breaker then."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""


class CheckpointsDocument(DocumentBody, frozen=True, kw_only=True, tag="checkpoints_document.v1"):
    """All that the catalog knows of a job's checkpoints: any replica can go on from it.

    Key: the job; `everstep.subjects.CLUSTER` says how far the facts of all jobs were read. It is an
    index, made again from the files by a scan.
    """

    checkpoints: tuple[KnownCheckpoint, ...] = ()
    """Those of the global tier, and the newest in memory."""
    holdings: tuple[Holding, ...] = ()
    """Which node has which slot's state in memory."""
    roots: tuple[str, ...] = ()
    """Folders and URLs in which the job has checkpoints."""
    round: Count = 0
    """The newest round that was heard of."""
    slots: Int = 0
    """Its slots; 0 when no round runs."""
    world_size: Count = 0
    """Its ranks: what is in memory can be restored by as many only."""
    restored_step: Count | None = None
    """What the newest round began from."""
    degraded_at: Time | None = None
    """Since when fewer node losses than wanted can be survived; None while enough can."""
    survivable_losses: Int | None = None
    """How many could be survived when that was last said."""
    stream: str = ""
    """The incarnation of the stream of facts that was read."""
    sequence: Int = 0
    """How far it was read."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""


class CasesDocument(DocumentBody, frozen=True, kw_only=True, tag="cases_document.v1"):
    """What attribution knows of a job's incidents: any replica can go on from it.

    Key: the job; `everstep.subjects.CLUSTER` says how far the facts of all jobs were read, and
    what was said about nodes and incidents of all jobs.
    """

    cases: tuple[Case, ...] = ()
    """The newest incidents, the oldest first; the last one may not have been opened yet."""
    members: tuple[Member, ...] = ()
    """The nodes of the newest round."""
    round: Count = 0
    """The newest round that was heard of."""
    world_size: Count = 0
    """Its ranks."""
    step: Count | None = None
    """The last step that was heard of."""
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


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, what its keys are, and what each holds."""

    name: str
    key: str
    holds: type[DocumentBody]


BUCKETS = (
    Bucket("ROUNDS", "<job>", RoundDocument),
    Bucket("LIMITS", "<job>", LimitsDocument),
    Bucket("STRAGGLERS", "<job>", StragglersDocument),
    Bucket("CONTROL", "<job> or _cluster", ControlDocument),
    Bucket("NODES", "_cluster", NodesDocument),
    Bucket("CHECKPOINTS", "<job> or _cluster", CheckpointsDocument),
    Bucket("CASES", "<job> or _cluster", CasesDocument),
)
"""Every bucket of documents on the bus."""
