"""Which suspect nodes health excludes, for how long, and when it must stop doing so."""

from dataclasses import dataclass
from typing import Literal

from msgspec.structs import replace

from everstep.messages import (
    BreakerClosed,
    BreakerOpened,
    Exile,
    NodeExcluded,
    NodeIncluded,
    NodeRecord,
)
from everstep.messages.facts.stamp import FactStamp
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.register import NodeRegister

ExclusionMode = Literal["observe", "enforce"]
_DOUBLINGS_MOST = 5


@dataclass(frozen=True, slots=True)
class ExclusionScope:
    """The settings and switches that a decision depends on, besides the register."""

    nodes: int
    """The number of nodes; the breaker allows health to exclude a share of them."""
    enforces: bool = False
    """Exclusions bind; otherwise health only records them."""
    enforces_probes: bool = False
    """Exclusions bind whose cause is a probe: its policy `exclude` has allowed them."""

    def mode(self, record: NodeRecord) -> ExclusionMode:
        """The mode of an exclusion of this node, as in `node_excluded`."""
        is_of_probe = record.cause == "probe" and self.enforces_probes
        return "enforce" if self.enforces or is_of_probe else "observe"


def decide(register: NodeRegister, scope: ExclusionScope, now: FactStamp) -> None:
    """End exclusions whose time is over, and exclude suspect nodes with new evidence."""
    for record in list(register.nodes.values()):
        _end(register, record, now)
    _close_in_time(register, now)
    for record in sorted(register.nodes.values(), key=lambda node: node.node):
        exile = exile_of(record)
        is_out = exile is not None and exile.mode in {"enforce", scope.mode(record)}
        if record.is_undecided and record.suspicion and not is_out:
            _exclude(register, record, scope, now)


def exile_of(record: NodeRecord) -> Exile | None:
    """The newest exclusion by health, if its time is not over."""
    newest = record.exiles[-1] if record.exiles else None
    return None if newest is None or newest.is_over else newest


def exiled(register: NodeRegister) -> dict[str, Exile]:
    """The exclusions by health that bind, by node."""
    exiles = {record.node: exile_of(record) for record in register.nodes.values()}
    return {node: exile for node, exile in exiles.items() if exile and exile.mode == "enforce"}


def pardon(register: NodeRegister, node: str) -> None:
    """Include a node for a person: drop all evidence against it, and end its exclusions."""
    register.forgive(node)
    record = register.record(node)
    if record.exiles:
        register.put(replace(record, exiles=tuple(replace(e, is_over=True) for e in record.exiles)))


def close_breaker(register: NodeRegister, by: str, reason: str, now: FactStamp) -> bool:
    """Let health exclude nodes again, for a person; False if the breaker was closed."""
    if register.opened_at is None:
        return False
    register.closed_at = now.wall  # earlier exclusions count no more
    _close(register, by, reason, now)
    return True


def recent(register: NodeRegister, mode: ExclusionMode, now: FactStamp) -> int:
    """The number of exclusions that the breaker counts; those only observed count apart."""
    closed = register.closed_at
    return sum(
        exile.mode == mode
        and now.since_s(exile.at) < register.settings.breaker_window_s
        and (closed is None or exile.at > closed)
        for record in register.nodes.values()
        for exile in record.exiles
    )


def limit_of(register: NodeRegister, scope: ExclusionScope) -> int:
    """The number of nodes that health may exclude within the breaker's window."""
    nodes = max(scope.nodes, len(register.nodes))
    return max(1, int(register.settings.breaker_ratio * nodes))


def _exclude(
    register: NodeRegister, record: NodeRecord, scope: ExclusionScope, now: FactStamp
) -> None:
    settings = register.settings
    mode = scope.mode(record)
    before = sum(exile.mode == mode for exile in record.exiles)
    if before >= settings.exclude_most:
        register.put(
            replace(record, is_undecided=False)
        )  # exclusion does not help: people must look
        return
    made, most = recent(register, mode, now), limit_of(register, scope)
    if register.opened_at is not None:
        return
    if made >= most:
        _open_breaker(register, made, most, now)
        return
    ttl_s = settings.exclude_ttl_s * 2 ** min(before, _DOUBLINGS_MOST)
    exile = Exile(at=now.wall, ttl_s=ttl_s, reason=record.reason, mode=mode)
    register.put(replace(record, exiles=(*record.exiles, exile), is_undecided=False))
    register.decide(
        NodeExcluded(
            **now.head(CLUSTER),
            node=record.node,
            by="health",
            reason=f"{record.reason} (exclusion {before + 1} of {settings.exclude_most}; "
            f"{made + 1} of {most} within {settings.breaker_window_s:g} s)",
            ttl_s=ttl_s,
            mode=mode,
            exclusions_in_window=made + 1,
        )
    )


def _open_breaker(register: NodeRegister, made: int, most: int, now: FactStamp) -> None:
    settings = register.settings
    register.opened_at = now.wall
    waiting = [r for r in register.nodes.values() if r.is_undecided and r.suspicion]
    causes = sorted({record.cause for record in waiting})
    register.decide(
        BreakerOpened(
            **now.head(CLUSTER),
            exclusions=made,
            limit=most,
            window_s=settings.breaker_window_s,
            reason=f"{made} nodes were excluded within {settings.breaker_window_s:g} s, limit "
            f"{most}, and {len(waiting)} more are suspect by {' and '.join(causes)}: when many "
            f"nodes fail at once, the cause may be elsewhere",
        )
    )


def _close_in_time(register: NodeRegister, now: FactStamp) -> None:
    opened, window_s = register.opened_at, register.settings.breaker_window_s
    if opened is not None and now.since_s(opened) >= window_s:
        _close(register, "health", f"{window_s:g} s have passed", now)


def _close(register: NodeRegister, by: str, reason: str, now: FactStamp) -> None:
    register.opened_at = None
    register.decide(BreakerClosed(**now.head(CLUSTER), by=by, reason=reason))


def _end(register: NodeRegister, record: NodeRecord, now: FactStamp) -> None:
    exile = exile_of(record)
    if exile is None or now.since_s(exile.at) < exile.ttl_s:
        return
    over = tuple(replace(past, is_over=True) for past in record.exiles)
    register.put(replace(record, exiles=over))
    if exile.mode == "enforce":
        register.decide(
            NodeIncluded(
                **now.head(CLUSTER),
                node=record.node,
                by="health",
                reason=f"the {exile.ttl_s:g} s of its exclusion are over",
            )
        )
