"""What health remembers of each node: the pieces of its document in `NODES`."""

from everstep.messages.base import Count, Int, Name, Part, Time
from everstep.messages.facts.health import CheckResult


class Strike(Part, frozen=True, kw_only=True):
    """Something that speaks against a node, counted once however often it is told."""

    key: str
    """The incident that it is about, else the fact: another one with this key takes its place."""
    at: Time
    """When it happened, by the clock of whoever said so; never later than it was read."""
    fact: str
    """The id of the fact that says so."""
    reason: str
    """What it says."""
    check: Name = ""
    """The check that failed, if it is about one."""
    revision: Count = 0
    """That of the verdict, if it is from one."""


class FailingCheck(Part, frozen=True, kw_only=True):
    """A check that fails on a node, and for how long it has."""

    result: CheckResult
    """What it said last."""
    since: Time
    """When it was first seen to fail."""
    window_since: Time
    """When the latest window began in which it failed."""
    windows: Int = 1
    """In how many windows it was seen to fail, without having passed in between."""
    fact: str = ""
    """The id of the fact that said so last."""


class Exile(Part, frozen=True, kw_only=True):
    """An exclusion that health has decided by itself."""

    at: Time
    """When."""
    ttl_s: float
    """For how long."""
    reason: str
    """Why."""
    mode: Name = "observe"
    """`enforce`, or `observe`: it was only said."""
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
    """What speaks against it, within the window."""
    suspicion: str = ""
    """The id of the `node_suspected` that holds; empty for none."""
    cause: Name = ""
    """Its cause, as in `node_suspected`."""
    reason: str = ""
    """What it says."""
    is_undecided: bool = False
    """Something new speaks against it, and nothing was decided about that yet."""
    exiles: tuple[Exile, ...] = ()
    """Its exclusions by health, the newest last."""
