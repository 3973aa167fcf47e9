"""Questions to health about limits, nodes and switches, and their replies."""

from collections.abc import Mapping

from everstep.messages.base import Int, Name, Part, Question, Reply
from everstep.messages.documents.health import Exclusion
from everstep.messages.facts.health import CheckResult, SectionLimit


class ShowLimits(Question, frozen=True, kw_only=True, tag="show_limits.v1"):
    """Which limits hold? Anyone asks health. The answer is a `LimitsDocument`."""


LEAST_LIMIT_S = 0.1
"""The shortest limit that a person may set: a shorter one would find a stall in every step."""


class SetLimit(Question, frozen=True, kw_only=True, tag="set_limit.v1"):
    """Use this limit from now on. An operator asks health."""

    limit: SectionLimit
    """The limit; with 0 s, health learns the limit again."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class NodeStanding(Part, frozen=True, kw_only=True):
    """How health judges a node."""

    node: Name
    """The node."""
    state: Name
    """`healthy`, `suspect`, `lost`, `excluded` or `unknown`."""
    reason: str = ""
    """Why."""
    strikes: Int = 0
    """Strikes in the window, over all jobs."""
    silence_s: float | None = None
    """The time since the node's last sign of life."""
    failing: tuple[CheckResult, ...] = ()
    """The results of the node's last checks that are not `ok`."""
    exclusion: Exclusion | None = None
    """The node's exclusion, if the node is excluded."""


class ShowNodes(Question, frozen=True, kw_only=True, tag="show_nodes.v1"):
    """How do you judge these nodes? Rendezvous asks health before a round; people ask, too."""

    nodes: tuple[Name, ...] = ()
    """The nodes; empty for all nodes of the job, or for all that are known."""


class NodeStandings(Reply, frozen=True, kw_only=True, tag="node_standings.v1"):
    """How health judges nodes; nodes that it has never heard of are `unknown`."""

    nodes: tuple[NodeStanding, ...]
    """Each node that was asked for, the worst first."""


class ExcludeNode(Question, frozen=True, kw_only=True, tag="exclude_node.v1"):
    """Let this node join no job. An operator asks health; attribution may advise it."""

    node: Name
    """The node."""
    by: Name
    """The person or service."""
    reason: str
    """Why."""
    ttl_s: float | None = None
    """How long the exclusion lasts; None for the configured time, 0 until somebody includes the
    node again."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class IncludeNode(Question, frozen=True, kw_only=True, tag="include_node.v1"):
    """Let this node join again. An operator asks health."""

    node: Name
    """The node."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class SetControl(Question, frozen=True, kw_only=True, tag="set_control.v1"):
    """Change switches at run time, or pull the brake. An operator asks health."""

    changes: Mapping[str, str]
    """New values by dotted name: `{"brake": "on", "modes.exclude": "enforce"}`; an empty value
    restores the default. `{"breaker": "closed"}` lets health exclude nodes again."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""
