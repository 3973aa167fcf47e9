"""Which suspect nodes are excluded, for how long, and when health must stop doing so."""

from dataclasses import dataclass

from msgspec.structs import replace

from everstep.messages import (
    BreakerClosed,
    BreakerOpened,
    Exile,
    NodeExcluded,
    NodeIncluded,
    NodeRecord,
)
from everstep_services.health.nodes.register import Moment, Register

_DOUBLINGS_MOST = 5


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a decision depends on beside the register."""

    nodes: int
    """How many nodes there are: the breaker lets a share of them go."""
    enforces: bool = False
    """Exclusions bind; else they are only said."""


def decide(register: Register, around: Circumstances, now: Moment) -> None:
    """End what is over, and exclude whom something new speaks against."""
    for record in list(register.nodes.values()):
        _end(register, record, now)
    _close_in_time(register, now)
    for record in sorted(register.nodes.values(), key=lambda one: one.node):
        exile = exile_of(record)
        is_out = exile is not None and (exile.mode == "enforce" or not around.enforces)
        if record.is_undecided and record.suspicion and not is_out:
            _exclude(register, record, around, now)


def exile_of(record: NodeRecord) -> Exile | None:
    """The newest exclusion by health, if its time is not over."""
    newest = record.exiles[-1] if record.exiles else None
    return None if newest is None or newest.is_over else newest


def exiled(register: Register) -> dict[str, Exile]:
    """Whom health keeps out."""
    found = {record.node: exile_of(record) for record in register.nodes.values()}
    return {node: one for node, one in found.items() if one is not None and one.mode == "enforce"}


def pardon(register: Register, node: str) -> None:
    """Somebody includes the node: nothing that was before is held against it."""
    register.forgive(node)
    record = register.record(node)
    if record.exiles:
        register.put(replace(record, exiles=tuple(replace(e, is_over=True) for e in record.exiles)))


def close_breaker(register: Register, by: str, reason: str, now: Moment) -> bool:
    """A person lets health exclude nodes again; False if it may already."""
    if register.opened_at is None:
        return False
    register.closed_at = now.wall  # what was before is forgiven
    _close(register, by, reason, now)
    return True


def recent(register: Register, mode: str, now: Moment) -> int:
    """Exclusions by health that the breaker counts: what was only said takes nobody away."""
    closed = register.closed_at
    return sum(
        one.mode == mode
        and now.since_s(one.at) < register.rules.breaker_window_s
        and (closed is None or one.at > closed)
        for record in register.nodes.values()
        for one in record.exiles
    )


def limit_of(register: Register, around: Circumstances) -> int:
    """How many nodes health may exclude within the breaker's window."""
    nodes = max(around.nodes, len(register.nodes))
    return max(1, int(register.rules.breaker_ratio * nodes))


def _exclude(register: Register, record: NodeRecord, around: Circumstances, now: Moment) -> None:
    rules = register.rules
    mode = "enforce" if around.enforces else "observe"
    before = sum(one.mode == mode for one in record.exiles)
    if before >= rules.exclude_most:
        register.put(replace(record, is_undecided=False))  # it does not help: people must look
        return
    made, most = recent(register, mode, now), limit_of(register, around)
    if register.opened_at is not None:
        return
    if made >= most:
        _open_breaker(register, made, most, now)
        return
    ttl_s = rules.exclude_ttl_s * 2 ** min(before, _DOUBLINGS_MOST)
    exile = Exile(at=now.wall, ttl_s=ttl_s, reason=record.reason, mode=mode)
    register.put(replace(record, exiles=(*record.exiles, exile), is_undecided=False))
    register.say(
        NodeExcluded(
            **now.about(),
            node=record.node,
            by="health",
            reason=f"{record.reason} (exclusion {before + 1} of {rules.exclude_most}; "
            f"{made + 1} of {most} within {rules.breaker_window_s:g} s)",
            ttl_s=ttl_s,
            mode=mode,
            exclusions_in_window=made + 1,
        )
    )


def _open_breaker(register: Register, made: int, most: int, now: Moment) -> None:
    rules = register.rules
    register.opened_at = now.wall
    waiting = [one for one in register.nodes.values() if one.is_undecided and one.suspicion]
    causes = sorted({one.cause for one in waiting})
    register.say(
        BreakerOpened(
            **now.about(),
            exclusions=made,
            limit=most,
            window_s=rules.breaker_window_s,
            reason=f"{made} nodes were excluded within {rules.breaker_window_s:g} s, limit {most}, "
            f"and {len(waiting)} more are suspect by {' and '.join(causes)}: when so many fail at "
            f"once, something else may be to blame",
        )
    )


def _close_in_time(register: Register, now: Moment) -> None:
    opened, window_s = register.opened_at, register.rules.breaker_window_s
    if opened is not None and now.since_s(opened) >= window_s:
        _close(register, "health", f"{window_s:g} s have passed", now)


def _close(register: Register, by: str, reason: str, now: Moment) -> None:
    register.opened_at = None
    register.say(BreakerClosed(**now.about(), by=by, reason=reason))


def _end(register: Register, record: NodeRecord, now: Moment) -> None:
    exile = exile_of(record)
    if exile is None or now.since_s(exile.at) < exile.ttl_s:
        return
    over = tuple(replace(one, is_over=True) for one in record.exiles)
    register.put(replace(record, exiles=over))
    if exile.mode == "enforce":
        register.say(
            NodeIncluded(
                **now.about(),
                node=record.node,
                by="health",
                reason=f"the {exile.ttl_s:g} s of its exclusion are over",
            )
        )
