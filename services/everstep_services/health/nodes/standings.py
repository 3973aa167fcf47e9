"""What health thinks of nodes, the worst first. Pure."""

from collections.abc import Iterable, Mapping

from everstep.messages import Exclusion, NodeStanding
from everstep.messages.base import Time
from everstep_services.health.nodes.register import Register

_STATES = ("excluded", "lost", "suspect", "healthy", "unknown")
_SHOWN_MOST = 2000
"""More would not fit into one message."""
Heard = Mapping[str, tuple[float, bool]]
"""How long each node is silent, and whether it is lost."""


def standings(
    nodes: Iterable[str],
    register: Register,
    exclusions: Iterable[Exclusion],
    heard: Heard,
    wall: Time,
) -> tuple[NodeStanding, ...]:
    """Each of these nodes."""
    out = {one.node: one for one in exclusions if one.until is None or one.until > wall}
    found = [_standing(node, register, out.get(node), heard) for node in set(nodes)]
    found.sort(key=lambda one: (_STATES.index(one.state), -one.strikes, one.node))
    return tuple(found[:_SHOWN_MOST])


def _standing(
    node: str, register: Register, exclusion: Exclusion | None, heard: Heard
) -> NodeStanding:
    record, silence = register.record(node), heard.get(node)
    state, reason = "unknown", "nobody has heard of it" if silence is None else ""
    if silence is not None or record.checked_at is not None:
        state, reason = "healthy", ""
    if record.suspicion:
        state, reason = "suspect", record.reason
    if silence is not None and silence[1]:
        state, reason = "lost", f"nothing was heard of it for {silence[0]:.1f} s"
    if exclusion is not None:
        state, reason = "excluded", f"by {exclusion.by}: {exclusion.reason}"
    return NodeStanding(
        node=node,
        state=state,
        reason=reason,
        strikes=len(register.strikes(record)),
        silence_s=None if silence is None else round(silence[0], 3),
        failing=tuple(one.result for one in record.failing),
        exclusion=exclusion,
    )
