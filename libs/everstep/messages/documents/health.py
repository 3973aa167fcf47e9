"""The documents of health: limits of sections, switches, and what it remembers of each node."""

from collections.abc import Mapping

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.health import CheckResult, SectionLimit


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


class Exclusion(Part, frozen=True, kw_only=True):
    """A node that may not join."""

    node: Name
    """The node."""
    by: Name
    """Who decided."""
    reason: str
    """Why."""
    until: Time | None = None
    """When it ends, by the wall clock of the service that decides; None for no end."""


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


class Strike(Part, frozen=True, kw_only=True):
    """Evidence against a node, counted once however often it is reported."""

    key: str
    """The incident that it is about, else the fact: a later strike with this key replaces it."""
    at: Time
    """When it happened, by the clock of its reporter; never later than it was read."""
    fact: str
    """The id of the fact that reported it."""
    reason: str
    """The evidence, in words."""
    check: Name = ""
    """The check that failed, if it is about one."""
    revision: Count = 0
    """That of the verdict, if it is from one."""


class FailingCheck(Part, frozen=True, kw_only=True):
    """A check that fails on a node, and for how long it has."""

    result: CheckResult
    """Its last result."""
    since: Time
    """When it was first seen to fail."""
    window_since: Time
    """When the latest window began in which it failed."""
    windows: Int = 1
    """In how many windows it was seen to fail, without having passed in between."""
    fact: str = ""
    """The id of the fact that reported it last."""


class ConfirmedFailure(Part, frozen=True, kw_only=True):
    """A probe with the policy `exclude` that has failed on a node, and passed on another node."""

    check: Name
    """The check."""
    at: Time
    """When rendezvous decided that it fails on this node only; never later than it was read."""
    fact: str
    """The id of the `action_decided`."""
    reason: str
    """The evidence, in words."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts about the failure."""


class Exile(Part, frozen=True, kw_only=True):
    """An exclusion that health has decided by itself."""

    at: Time
    """When."""
    ttl_s: float
    """For how long."""
    reason: str
    """Why."""
    mode: Name = "observe"
    """`enforce`, or `observe`: it was only recorded."""
    is_over: bool = False
    """Its time has passed, or somebody included the node."""


class NodeRecord(Part, frozen=True, kw_only=True):
    """What health remembers of one node, over all jobs."""

    node: Name
    """The node."""
    checks: tuple[str, ...] = ()
    """The checks that have run on it."""
    checked_at: Time | None = None
    """When it was examined last."""
    failing: tuple[FailingCheck, ...] = ()
    """The checks that fail on it."""
    strikes: tuple[Strike, ...] = ()
    """The evidence against it, within the window."""
    suspicion: str = ""
    """The id of the `node_suspected` that holds; empty for none."""
    cause: Name = ""
    """Its cause, as in `node_suspected`."""
    reason: str = ""
    """The evidence, in words."""
    is_undecided: bool = False
    """There is new evidence against it that nothing was decided about yet."""
    exiles: tuple[Exile, ...] = ()
    """Its exclusions by health, the newest last."""
    confirmed: tuple[ConfirmedFailure, ...] = ()
    """The failures of probes with the policy `exclude`, until their checks pass again."""


class NodesDocument(DocumentBody, frozen=True, kw_only=True, tag="nodes_document.v1"):
    """All that health remembers of nodes: any replica can continue from it.

    Key: `everstep.subjects.CLUSTER`. How far the facts were read is written together with
    what they came to.
    """

    nodes: tuple[NodeRecord, ...] = ()
    """Every node that was examined, or has evidence against it."""
    stream: str = ""
    """The incarnation of the stream of facts that was read."""
    sequence: Int = 0
    """How far it was read."""
    distrusted: tuple[str, ...] = ()
    """Checks that fail on too many nodes to count against any of them."""
    breaker_opened_at: Time | None = None
    """Since when health excludes no more nodes by itself; None while it may."""
    breaker_closed_at: Time | None = None
    """Earlier exclusions no longer count: an operator closed the breaker then."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
