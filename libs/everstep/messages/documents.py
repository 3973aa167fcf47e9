"""What the buckets hold: the rounds, the limits and the switches that are in force."""

from collections.abc import Mapping
from dataclasses import dataclass

from everstep.messages.base import DocumentBody, Int, Part, Time
from everstep.messages.health import SectionLimit
from everstep.messages.incidents import Budget
from everstep.messages.jobs import JobSpec


class Seat(Part, frozen=True, kw_only=True, array_like=True):
    """A node that has joined, with or without a slot, as an array in the order of its fields.

    An array, because 12,500 of them must fit into one document of 1 MiB.
    """

    node: str
    """The node."""
    slot: Int | None
    """Its slot in this round; None for a spare and while the round forms."""
    ranks: Int
    """How many processes it can run."""
    address: str
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


class RoundDocument(DocumentBody, frozen=True, kw_only=True, tag="round_document.v1"):
    """All that rendezvous knows about a job: any replica can go on from it.

    Key: the job. Times in it are for people; a replica that takes over starts its timers
    anew.
    """

    job: str
    """The job."""
    round: Int
    """The newest round: the fencing token of everything about this job."""
    phase: str
    """`joining`, `forming`, `running`, `ending`, `done` or `stopped`."""
    spec: JobSpec
    """What the job is meant to be."""
    allocation: str
    """The allocation that it runs in."""
    phase_since: Time
    """When the phase began, for people."""
    reason: str = ""
    """Why it is in this phase."""
    seats: tuple[Seat, ...] = ()
    """Every node that has joined."""
    started: tuple[Int, ...] = ()
    """While starting: the slots whose ranks run; empty once all do."""
    stopped: tuple[Int, ...] = ()
    """While ending: the slots whose ranks are gone."""
    world_size: Int = 0
    """Ranks in this round."""
    master_address: str = ""
    """Where the ranks meet."""
    master_port: Int = 0
    """The port there."""
    incident: str | None = None
    """The incident that is open, if any."""
    restarts: Int = 0
    """Restarts so far."""
    budgets: tuple[Budget, ...] = ()
    """What is left of each limit."""
    last_step: Int | None = None
    """The highest step that any round reached."""
    fingerprints: tuple[str, ...] = ()
    """Of the latest failures, the newest last, at most 10."""
    exit_code: Int | None = None
    """Once it is done or stopped: what agents exit with."""


class LimitsDocument(DocumentBody, frozen=True, kw_only=True, tag="limits_document.v1"):
    """Past which limits a job's ranks have stalled; health writes it, agents read it.

    Key: the job.
    """

    job: str
    """The job."""
    limits: tuple[SectionLimit, ...]
    """One for each section that has been seen, and for the time outside all."""
    first_step_limit_s: float
    """For everything up to the end of a round's first step."""
    reason: str
    """The rule, and the numbers that went into it."""
    round: Int | None = None
    """The round whose observations are the latest in it."""


class Exclusion(Part, frozen=True, kw_only=True):
    """A node that may not join."""

    node: str
    """The node."""
    by: str
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
    """Changed at run time, by dotted name: `{"straggler.enabled": "false"}`."""
    changed_by: str
    """Who wrote it last."""
    reason: str
    """Why."""
    is_braked: bool = False
    """The global brake: every actuator only observes."""
    modes: Mapping[str, str]
    """`observe` or `enforce` by actuator: `stop`, `exclude`, `restart`, `replace`, `shrink`."""
    exclusions: tuple[Exclusion, ...] = ()
    """Nodes that may not join."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """A bucket, what its keys are, and what each holds."""

    name: str
    key: str
    holds: type[DocumentBody]


BUCKETS = (
    Bucket("ROUNDS", "<job>", RoundDocument),
    Bucket("LIMITS", "<job>", LimitsDocument),
    Bucket("CONTROL", "<job> or _cluster", ControlDocument),
)
"""Every bucket of documents on the bus."""
