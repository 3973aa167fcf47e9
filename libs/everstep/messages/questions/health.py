"""Questions to health about limits, nodes and switches, and their replies."""

from collections.abc import Mapping

from everstep.messages.base import Int, Name, Part, Question, Reply
from everstep.messages.documents.health import Exclusion
from everstep.messages.facts.health import CheckResult, SectionLimit


class ShowLimits(Question, frozen=True, kw_only=True, tag="show_limits.v1"):
    """Which limits apply? Anyone asks health. The answer is a `LimitsDocument`."""


LEAST_LIMIT_S = 0.1
"""The shortest limit that a person may set: a shorter one would find a stall in every step."""


class SetLimit(Question, frozen=True, kw_only=True, tag="set_limit.v1"):
    """Use this limit from now on. An operator asks health."""

    limit: SectionLimit
    """The limit; one of 0 s makes it learned again."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class NodeStanding(Part, frozen=True, kw_only=True):
    """What health thinks of a node."""

    node: Name
    """The node."""
    state: Name
    """`healthy`, `suspect`, `lost`, `excluded` or `unknown`."""
    reason: str = ""
    """Why."""
    strikes: Int = 0
    """Strikes in the window, over all jobs."""
    silence_s: float | None = None
    """Since its last sign of life."""
    failing: tuple[CheckResult, ...] = ()
    """What its last checks found that is not `ok`."""
    exclusion: Exclusion | None = None
    """Its exclusion, if it is excluded."""


class ShowNodes(Question, frozen=True, kw_only=True, tag="show_nodes.v1"):
    """What do you think of these nodes? Rendezvous asks health before a round; people, too."""

    nodes: tuple[Name, ...] = ()
    """Which; empty for all of the job's, or for all that are known."""


class NodeStandings(Reply, frozen=True, kw_only=True, tag="node_standings.v1"):
    """What health thinks of nodes; those that it has never heard of are `unknown`."""

    nodes: tuple[NodeStanding, ...]
    """Each that was asked for, the worst first."""


class ExcludeNode(Question, frozen=True, kw_only=True, tag="exclude_node.v1"):
    """Let this node join nothing. An operator asks health; attribution may advise it."""

    node: Name
    """The node."""
    by: Name
    """The person or service."""
    reason: str
    """Why."""
    ttl_s: float | None = None
    """How long; None for the configured time, 0 until somebody includes it again."""
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
    """By dotted name: `{"brake": "on", "modes.exclude": "enforce"}`; an empty value goes back to
    the default. `{"breaker": "closed"}` lets health exclude nodes again."""
    by: Name
    """The person, as authenticated."""
    reason: str
    """Why."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""
