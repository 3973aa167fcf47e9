"""The state of each node as health reports it, the worst first; pure."""

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from everstep.messages import Exclusion, NodeStanding
from everstep.messages.base import Time
from everstep_services.health.nodes.register import NodeRegister

StandingState = Literal["excluded", "lost", "suspect", "healthy", "unknown"]
"""The worst first."""
_STATES: tuple[str, ...] = get_args(StandingState)
_SHOWN_MOST = 2000
"""More would not fit into one message."""
Silences = Mapping[str, tuple[float, bool]]
"""How long each node is silent, and whether it is lost."""


def standings(
    nodes: Iterable[str],
    register: NodeRegister,
    exclusions: Iterable[Exclusion],
    silences: Silences,
    wall: Time,
) -> tuple[NodeStanding, ...]:
    """The standing of each of these nodes."""
    in_force = {e.node: e for e in exclusions if e.until is None or e.until > wall}
    rows = [_standing(node, register, in_force.get(node), silences) for node in set(nodes)]
    rows.sort(key=lambda row: (_STATES.index(row.state), -row.strikes, row.node))
    return tuple(rows[:_SHOWN_MOST])


def _standing(
    node: str, register: NodeRegister, exclusion: Exclusion | None, silences: Silences
) -> NodeStanding:
    record, silence = register.record(node), silences.get(node)
    state: StandingState = "unknown"
    reason = "health knows nothing of it" if silence is None else ""
    if silence is not None or record.checked_at is not None:
        state, reason = "healthy", ""
    if record.suspicion:
        state, reason = "suspect", record.reason
    if silence is not None and silence[1]:
        state, reason = "lost", f"it has been silent for {silence[0]:.1f} s"
    if exclusion is not None:
        state, reason = "excluded", f"by {exclusion.by}: {exclusion.reason}"
    return NodeStanding(
        node=node,
        state=state,
        reason=reason,
        strikes=len(register.strikes(record)),
        silence_s=None if silence is None else round(silence[0], 3),
        failing=tuple(check.result for check in record.failing),
        exclusion=exclusion,
    )
