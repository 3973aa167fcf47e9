"""Why a rank is slow: where its excess is, and what its host and device report."""

from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_score

from everstep.messages import Score
from everstep.slow_rank_causes import SlowRankCause
from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.live.own_times import RoleTable
from everstep_services.straggler.domain.live.slow_row import EXPLAINS, SlowRow, SlowSignal, peers_of
from everstep_services.straggler.domain.operations import Array, cause_of
from everstep_services.straggler.domain.verdict import Found, SlownessLimits

_ROUND_TRIPS = 3.0
"""Round trips are long from this multiple of its peers' on."""
_LEAST_ROUND_TRIP_S = 0.0005
_OF_LOSS = 0.05
"""And from this share of a step's loss on: a collective takes some round trips."""
_FAULT_S = 0.0005
"""Reading a page from a disk takes about this long: 0.1 ms from flash, otherwise some 5 ms."""
_CLOCK = 0.95
"""A device is slow below this share of its peers' clock."""
_SURE, _LIKELY, _GUESSED = 0.95, 0.8, 0.3
_SHOWN = 0.25
"""A window that shows less of what a rank loses over its horizon tells nothing about the cause."""
_LATE_CONFIDENCE = 0.6
"""For figures that the kernel counted in another window than the latest."""
_HOST = ("runnable_s", "throttled_s", "memory_pressure_s", "io_pressure_s")
"""In each of these seconds the main thread, or all of its cgroup, did not run."""


@dataclass(frozen=True, slots=True)
class Blame:
    """A cause with its numbers."""

    cause: SlowRankCause
    reason: str
    section: str | None
    scores: tuple[Score, ...]
    lost_s: float
    confidence: float


@dataclass(frozen=True, slots=True)
class _Ground:
    """The evidence for a cause."""

    cause: SlowRankCause
    words: str
    sureness: float
    share: float = 1.0
    section: str | None = None
    signals: tuple[SlowSignal, ...] = ()


def blame(
    measured: Measured, row: int, change: Found, limits: SlownessLimits, is_usual: Array
) -> Blame:
    """The cause of a rank's loss, compared with the rows that define what is usual."""
    peers = peers_of(measured, row, is_usual)
    own_time = SlowSignal("own", float(measured.own_s[row]), finite_median(measured.own_s[peers]))
    usual_loss = change.ratio * own_time.usual if np.isfinite(own_time.usual) else 0.0
    is_shown = own_time.excess > 0 and own_time.excess >= _SHOWN * usual_loss
    lost = max(own_time.excess if is_shown else usual_loss, 1e-9)
    case = SlowRow(measured, row, peers, lost)
    grounds = (_device, _host, _network, _memory, _section, _compute, _outside)
    ground = next(
        candidate for candidate in (ground(case) for ground in grounds) if candidate is not None
    )
    if not is_shown:
        ground = _Ground("unknown", "the latest window does not show why", _GUESSED)
    errors = dict(limits.horizons).get(change.windows, limits.horizons[0][1])
    limit = float(np.hypot(limits.found_ratio, errors * change.noise_ratio))
    place, sureness = _place(measured, row), ground.sureness
    if measured.silent[row]:
        place = "; its recorder did not answer, and all others waited longer for it"
        sureness = min(sureness, _LIKELY)
    if change.growth_ratio is not None:
        place += (
            f"; half of its role or more is slow: compared with the others, which are as fast as "
            f"before, while it takes {change.growth_ratio * 100:.0f} % longer than before"
        )
    reason = (
        f"own time {own_time.value * 1e3:.1f} ms a step, {own_time.excess * 1e3:.1f} ms above the "
        f"median of {len(peers)} others in the latest window; {change.ratio * 100:.1f} % over "
        f"{change.windows} windows (limit {limit * 100:.1f} %); {ground.words}{place}"
    )
    clearness = min(1.0, change.ratio / (2 * limit)) if limit > 0 else 1.0
    return Blame(
        cause=ground.cause,
        reason=reason,
        section=ground.section,
        scores=(
            replace_score(own_time.score(), relative_score=1 / (1 + max(0.0, change.ratio))),
            *(signal.score() for signal in ground.signals),
        ),
        lost_s=lost,
        confidence=round(sureness * min(1.0, ground.share) * clearness, 3),
    )


def _device(case: SlowRow) -> _Ground | None:
    """The driver throttles the device, or its clock is below those of its peers."""
    sample = case.measured.sample
    clock = case.plain("clock_mhz")
    is_low = clock.value < _CLOCK * clock.usual
    throttled = [reason for node in sample.nodes for reason in node.throttled]
    order = np.concatenate([node.rank for node in sample.nodes])
    by_rank = dict(zip(order.tolist(), throttled, strict=True))
    mine = set(by_rank[int(sample.rank[case.row])])
    peers = [by_rank[int(sample.rank[peer])] for peer in case.peers[:64]]
    reasons = sorted(
        reason for reason in mine if sum(reason in peer for peer in peers) * 2 < len(peers)
    )
    if not reasons and not is_low:
        return None
    why = f"its device is throttled by {', '.join(reasons)}" if reasons else "its device is slow"
    at = f" at {clock.value:.0f} MHz against {clock.usual:.0f}" if np.isfinite(clock.value) else ""
    return _Ground("device", why + at, _SURE if reasons and is_low else _LIKELY)


def held_back(measured: Measured) -> Array:
    """By row: for how much longer than others its host kept it from running, in seconds a step."""
    excess = _excess(measured, _HOST[0])
    for name in _HOST[1:]:
        excess = np.fmax(excess, _excess(measured, name))
    return excess


def throttled(measured: Measured) -> Array:
    """By row: for how much longer than others a quota kept it from running, in seconds a step."""
    return _excess(measured, "throttled_s")


def _excess(measured: Measured, name: str) -> Array:
    held_s = measured.per_step(name)
    return held_s - finite_median(held_s)


def from_host(why: Blame, held_s: float) -> Blame:
    """The finding with the host as its cause, if the host held the rank back for most of the loss.

    The kernel's figures of a host that is too busy may come a window late.
    """
    if why.cause != "unknown" or held_s < EXPLAINS * why.lost_s:
        return why
    words = (
        f"its host kept it from running for {held_s * 1e3:.1f} ms a step more than others in one "
        f"of the latest windows"
    )
    return replace(why, cause="host", reason=f"{words}: {why.reason}", confidence=_LATE_CONFIDENCE)


def _host(case: SlowRow) -> _Ground | None:
    """Its thread was ready to run and did not run: other processes, a quota, or the hypervisor."""
    signals = [*(case.per_step(name) for name in _HOST), case.steal()]
    worst = max(signals, key=lambda signal: signal.excess)
    share = worst.excess / case.lost_s
    if share < EXPLAINS:
        return None
    switches = case.per_step("involuntary_switches")
    also = f", {switches.value:.1f} involuntary switches a step against {switches.usual:.1f}"
    words = f"{_WORDS[worst.name]} {worst.shown()}"
    words += also if np.isfinite(switches.value) else ""
    return _Ground("host", words, _SURE, share, None, (worst,))


_WORDS = {
    "runnable": "its main thread waited for a processor",
    "throttled": "its cgroup's quota held it back",
    "steal": "the hypervisor gave its processors to others",
    "memory_pressure": "its cgroup waited for memory",
    "io_pressure": "its cgroup waited for a disk",
}


def _network(case: SlowRow) -> _Ground | None:
    """Its connections are slow, and its processor is not."""
    if len(case.measured.sample.nodes) < 2:
        return None
    trip, again = case.plain("round_trip_s"), case.per_step("retransmits")
    is_long = trip.value > max(_ROUND_TRIPS * trip.usual, trip.usual + _LEAST_ROUND_TRIP_S)
    is_long = is_long and trip.excess > _OF_LOSS * case.lost_s
    is_lossy = again.excess > 1
    cpu = case.per_step("main_cpu_s", "cpu")
    if not (is_long or is_lossy) or cpu.excess > EXPLAINS * case.lost_s:
        return None
    if case.is_input():
        return None
    words = (
        f"round trips of its connections {trip.value * 1e3:.2f} ms against "
        f"{trip.usual * 1e3:.2f} ms"
    )
    if np.isfinite(again.value):
        words += f", {again.value:.1f} segments a step sent again against {again.usual:.1f}"
    return _Ground("network", words, _SURE if is_long else _LIKELY)


def _memory(case: SlowRow) -> _Ground | None:
    """It waited for pages that were not in memory; the kernel tells how many these were."""
    faults, cpu = case.per_step("major_faults"), case.per_step("main_cpu_s", "cpu")
    explained_s = faults.excess * _FAULT_S
    if explained_s < EXPLAINS * case.lost_s or cpu.excess > EXPLAINS * case.lost_s:
        return None
    if case.is_input():
        return None  # a file of data that is mapped into memory
    words = f"{faults.value:.1f} major page faults a step against {faults.usual:.1f}"
    share = min(1.0, explained_s / case.lost_s)
    return _Ground("host", f"{words}: its memory was on a disk", _LIKELY, share)


def has_own_cause(case: SlowRow) -> bool:
    """Whether its device, its host or more computing explains the excess."""
    return any(ground(case) for ground in (_device, _host, _compute))


def _section(case: SlowRow) -> _Ground | None:
    """One section has most of the excess: on the device, where that is known, or on the thread."""
    return _on_device(case) or _on_thread(case)


def _on_device(case: SlowRow) -> _Ground | None:
    worst = next(iter(case.device_sections()), None)
    if worst is None or worst.excess < EXPLAINS * case.lost_s:
        return None
    words = (
        f"{_percent(worst, case)} of it in section {worst.name} on the device: {worst.shown()}, "
        f"without waiting for others"
    )
    signal = SlowSignal(f"device:{worst.name}", worst.value, worst.usual)
    share = worst.excess / case.lost_s
    return _Ground("compute", words, _LIKELY, share, worst.name, (signal,))


def _percent(signal: SlowSignal, case: SlowRow) -> str:
    return f"{min(signal.excess / case.lost_s, 1) * 100:.0f} %"


def _on_thread(case: SlowRow) -> _Ground | None:
    worst = next(iter(case.sections()), None)
    if worst is None or worst.excess < EXPLAINS * case.lost_s:
        return None
    share = worst.excess / case.lost_s
    words = (
        f"{_percent(worst, case)} of it in section {worst.name}: {worst.shown()}, "
        f"without waiting for others"
    )
    signal = SlowSignal(f"section:{worst.name}", worst.value, worst.usual)
    return _Ground(cause_of(worst.name), words, _LIKELY, share, worst.name, (signal,))


def _compute(case: SlowRow) -> _Ground | None:
    """Its main thread had more to compute."""
    cpu = case.per_step("main_cpu_s", "cpu")
    share = cpu.excess / case.lost_s
    if share < EXPLAINS:
        return None
    return _Ground(
        "compute", f"its main thread computed {cpu.shown()}", _LIKELY, share, None, (cpu,)
    )


def _outside(case: SlowRow) -> _Ground:
    """Neither its processor nor a section shows it."""
    cpu = case.per_step("main_cpu_s", "cpu")
    workers = case.per_step("workers_cpu_s", "workers")
    if workers.excess > EXPLAINS * case.lost_s:
        words = f"its data workers computed {workers.shown()}"
        return _Ground("input", words, _GUESSED, 1.0, None, (workers,))
    if np.isfinite(cpu.value):
        words = f"its main thread computed no more than others ({cpu.shown()}): it slept"
        return _Ground("unknown", words, _GUESSED, 1.0, None, (cpu,))
    return _Ground("unknown", "nothing is known of its host and its sections", _GUESSED)


def _place(measured: Measured, row: int) -> str:
    """Between which operations a row loses the most, in words; empty where that is not known."""
    if measured.entered is None:
        return ""
    table = measured.entered.own_times.table_of(row)
    if table is None:
        return ""
    pair = _worst_pair(measured, table, int(np.searchsorted(table.rows, row)))
    if pair is None:
        return ""
    return f"; most of it between {interval(*pair)}"


def interval(before: str, after: str) -> str:
    """Two operations, in words that tell them apart."""
    return f"one {before} and the next" if before == after else f"{before} and {after}"


def _worst_pair(measured: Measured, table: RoleTable, row: int) -> tuple[str, str] | None:
    assert measured.entered is not None
    ops = measured.ops
    at = table.entries[row]
    excess = np.where(at >= 0, table.segments[row] - table.usual, 0.0)
    matched = measured.entered.entries
    before, after = matched.op[at], matched.op[np.minimum(at + 1, len(matched.op) - 1)]
    is_pair = (at >= 0) & (before >= 0) & (after >= 0) & np.isfinite(excess)
    if not is_pair.any():
        return None
    key = before[is_pair].astype(np.int64) * len(ops) + after[is_pair]
    kinds, index = np.unique(key, return_inverse=True)
    worst = int(kinds[np.argmax(np.bincount(index, weights=excess[is_pair]))])
    return str(ops[worst // len(ops)]), str(ops[worst % len(ops)])
