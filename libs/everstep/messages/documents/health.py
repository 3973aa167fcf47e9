"""The documents of health: limits of sections, switches, and what it remembers of each node."""

from collections.abc import Mapping

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time
from everstep.messages.facts.health import CheckResult, SectionLimit


class LimitsDocument(DocumentBody, frozen=True, kw_only=True, tag="limits_document.v1"):
    """The limits after which ranks of a job have stalled; health writes it, agents read it.

    Key: the job.
    """

    job: Name
    """The job."""
    limits: tuple[SectionLimit, ...]
    """A limit for each section that was seen, and for the time outside all sections."""
    first_step_limit_s: float
    """The limit for everything up to the end of a round's first step."""
    reason: str
    """The rule, and the numbers that the rule was applied to."""
    round: Count | None = None
    """The round of the latest observations."""
    config_fingerprint: str = ""
    """The configuration that the limits were learned for: with another one, learning begins
    anew."""
    first_step_longest_s: float | None = None
    """The longest first step, the base of its limit; None before the first."""


class Exclusion(Part, frozen=True, kw_only=True):
    """A node that may not join."""

    node: Name
    """The node."""
    by: Name
    """Who decided."""
    reason: str
    """Why."""
    until: Time | None = None
    """When the exclusion ends, by the wall clock of the service that decides; None for no end."""


class ControlDocument(DocumentBody, frozen=True, kw_only=True, tag="control_document.v1"):
    """The switches that hold; operators and health write it, all processes follow it.

    Key: the job, or `everstep.subjects.CLUSTER` for all jobs. Where a job's document has no
    value, that of the cluster holds; the brake holds if either document has it on.
    """

    settings: Mapping[str, str]
    """Settings that were changed at run time, by dotted name: `{"catalog.keep_last": "5"}`."""
    changed_by: str
    """Who wrote the document last."""
    reason: str
    """Why."""
    is_braked: bool = False
    """The global brake: nothing acts, decisions are only recorded."""
    braked_by: str = ""
    """Who pulled the brake; empty while it is off."""
    brake_reason: str = ""
    """Why the brake was pulled, whatever else was changed after it."""
    modes: Mapping[str, str]
    """`observe` or `enforce` for each kind of action: `stop`, `exclude`, `restart`, `replace`,
    `shrink`."""
    exclusions: tuple[Exclusion, ...] = ()
    """Nodes that may not join."""


def combined(*documents: ControlDocument | None) -> ControlDocument:
    """The switches of all of them: a later one overrides an earlier one, the brake of any holds."""
    there = [document for document in documents if document is not None]
    return ControlDocument(
        settings={name: value for it in there for name, value in it.settings.items()},
        modes={name: mode for it in there for name, mode in it.modes.items()},
        is_braked=any(document.is_braked for document in there),
        exclusions=tuple(exclusion for it in there for exclusion in it.exclusions),
        changed_by="",
        reason="",
    )


class Strike(Part, frozen=True, kw_only=True):
    """Evidence against a node, counted once however often it is reported."""

    key: str
    """The incident that the strike is about, otherwise the fact: a later strike with this key
    replaces it."""
    at: Time
    """When it happened, by the clock of the reporter; at the latest, when health read it."""
    fact: str
    """The id of the fact that reported it."""
    reason: str
    """The evidence, in words."""
    check: Name = ""
    """The check that failed, if the strike is about a check."""
    revision: Count = 0
    """The revision of the verdict, if the strike is from a verdict."""
    event: str = ""
    """What the strike is about, as `JOB ROUND`: a node has one strike for it. Empty if the strike
    rests on more than the node's silence."""
    is_proof: bool = False
    """It alone makes the node suspect: its device computed the same wrong result each time, and
    another device did not."""


class FailingCheck(Part, frozen=True, kw_only=True):
    """A check that fails on a node, and for how long."""

    result: CheckResult
    """The last result."""
    since: Time
    """When the check was first seen to fail."""
    window_since: Time
    """When the latest window began in which it failed."""
    windows: Int = 1
    """In how many windows the check was seen to fail, without having passed in between."""
    fact: str = ""
    """The id of the fact that reported the failure last."""


class ConfirmedFailure(Part, frozen=True, kw_only=True):
    """A probe with the policy `exclude` that has failed on a node, and passed on another node."""

    check: Name
    """The check."""
    at: Time
    """When rendezvous decided that the check fails on this node only; at the latest, when health
    read it."""
    fact: str
    """The id of the `action_decided`."""
    reason: str
    """The evidence, in words."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts about the failure."""


class Exile(Part, frozen=True, kw_only=True):
    """An exclusion that health has decided by itself."""

    at: Time
    """When the exclusion began."""
    ttl_s: float
    """How long the exclusion lasts."""
    reason: str
    """Why."""
    mode: Name = "observe"
    """`enforce`, or `observe`: the exclusion was only recorded."""
    is_over: bool = False
    """The time has passed, or somebody included the node."""


class NodeRecord(Part, frozen=True, kw_only=True):
    """What health remembers of one node, over all jobs."""

    node: Name
    """The node."""
    checks: tuple[str, ...] = ()
    """The checks that have run on the node."""
    checked_at: Time | None = None
    """When the node was examined last."""
    is_unclear: bool = False
    """None of the checks of that examination had a clear result."""
    failing: tuple[FailingCheck, ...] = ()
    """The checks that fail on the node."""
    strikes: tuple[Strike, ...] = ()
    """The evidence against the node, within the window."""
    suspicion: str = ""
    """The id of the `node_suspected` that holds; empty for none."""
    cause: Name = ""
    """The cause of the suspicion, as in `node_suspected`."""
    reason: str = ""
    """The evidence, in words."""
    is_undecided: bool = False
    """There is new evidence against the node, about which nothing was decided yet."""
    exiles: tuple[Exile, ...] = ()
    """The exclusions of the node by health, the newest last."""
    confirmed: tuple[ConfirmedFailure, ...] = ()
    """The failures of probes with the policy `exclude`, until their checks pass again."""


class NodesDocument(DocumentBody, frozen=True, kw_only=True, tag="nodes_document.v1"):
    """All that health remembers of nodes: any replica can continue from it.

    Key: `everstep.subjects.CLUSTER`. The position in the stream is written together with the
    results of the facts up to there.
    """

    nodes: tuple[NodeRecord, ...] = ()
    """Every node that was examined, or has evidence against it."""
    stream: str = ""
    """The incarnation of the stream of facts."""
    sequence: Int = 0
    """The position in that stream up to which facts were read."""
    distrusted: tuple[str, ...] = ()
    """Checks that fail on too many nodes to count against any of them."""
    breaker_opened_at: Time | None = None
    """Since when health excludes no nodes by itself; None while it may."""
    breaker_closed_at: Time | None = None
    """When an operator closed the breaker: earlier exclusions no longer count."""
    outbox: tuple[str, ...] = ()
    """Facts that are decided and may not be recorded yet, as JSON."""
    settled: tuple[str, ...] = ()
    """The last events that a verdict has explained, as `JOB ROUND`, or in which the silence of a
    node is excused, as `JOB ROUND NODE`."""
