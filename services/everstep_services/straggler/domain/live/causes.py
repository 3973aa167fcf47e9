"""Why a rank is slow: where its excess is, and what its host and device report."""

from dataclasses import dataclass, replace

import numpy as np
from msgspec.structs import replace as replace_score

from everstep.messages import Score
from everstep.slow_rank_causes import SlowRankCause
from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.live.own import RoleTable
from everstep_services.straggler.domain.operations import Array, cause_of
from everstep_services.straggler.domain.verdict import Found, SlownessLimits

_MOST_PEERS = 2048
_EXPLAINS = 0.5
"""A signal is the cause if it explains this share of the excess."""
_ROUND_TRIPS = 3.0
"""Round trips are long from this multiple of its peers' on."""
_LEAST_ROUND_TRIP_S = 0.0005
_OF_LOSS = 0.05
"""And from this share of a step's loss on: a collective takes some round trips."""
_RING_TRIPS, _RING_LEAST_S = 2.0, 0.002
"""If the round trips of a rank's neighbour are this many times as long, and this much longer, than
its own, and the rank leaves collectives late, then the link from the neighbour is slow."""
_RING_OF_LOSS = 0.1
"""And longer by this share of what is lost in a step: who is accused must explain it."""
_FAULT_S = 0.0005
"""Reading a page from a disk takes about this long: 0.1 ms from flash, otherwise some 5 ms."""
_CLOCK = 0.95
"""A device is slow below this share of its peers' clock."""
_SURE, _LIKELY, _GUESSED = 0.95, 0.8, 0.3
_SHOWN = 0.25
"""A window that shows less of what a rank loses over its horizon tells nothing about the cause."""
_RING_CONFIDENCE = 0.6
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
class _Signal:
    """One measure of a rank and of its peers, in seconds a step where it is a time."""

    name: str
    value: float
    usual: float

    @property
    def excess(self) -> float:
        return self.value - self.usual if np.isfinite(self.value - self.usual) else 0.0

    def score(self) -> Score:
        ratio = self.usual / self.value if self.value > 0 else None
        return Score(
            signal=self.name[:512],
            relative_score=ratio,
            value_s=self.value,
            reference_s=self.usual,
        )

    def shown(self) -> str:
        return f"{self.value * 1e3:.1f} ms a step against {self.usual * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class _Case:
    """A slow row and the rows that it is compared with."""

    measured: Measured
    row: int
    peers: Array
    lost_s: float

    def per_step(self, name: str, shown: str = "") -> _Signal:
        """A time of the operating system."""
        values = self.measured.signal(name)
        steps = np.maximum(self.measured.sample.steps, 1)
        return self._signal(shown or name.removesuffix("_s"), values / steps)

    def plain(self, name: str) -> _Signal:
        return self._signal(name, self.measured.signal(name))

    def _signal(self, name: str, values: Array) -> _Signal:
        return _Signal(name, float(values[self.row]), finite_median(values[self.peers]))

    def sections(self) -> list[_Signal]:
        """Own times of sections, the largest excess first; of two equal ones the shorter."""
        return self._by_section(self.measured.own_sections_s)

    def device_sections(self) -> list[_Signal]:
        """The same on the device."""
        return self._by_section(self.measured.own_device_s)

    def _by_section(self, own: Array) -> list[_Signal]:
        signals = [
            self._signal(name, own[:, column])
            for column, name in enumerate(self.measured.sections.names)
            if name
        ]
        return sorted(
            signals, key=lambda signal: (-round(signal.excess / self.lost_s, 1), signal.value)
        )

    def is_input(self) -> bool:
        """Whether a section that reads data explains the excess."""
        own = next(iter(self.sections()), None)
        is_large = own is not None and own.excess > _EXPLAINS * self.lost_s
        return own is not None and is_large and cause_of(own.name) == "input"

    def steal(self) -> _Signal:
        """What the hypervisor took from the node, for each of its ranks."""
        sample = self.measured.sample
        counts = np.maximum(np.bincount(sample.node, minlength=len(sample.nodes)), 1)
        by_node = np.array([node.steal_s for node in sample.nodes]) / counts
        return self._signal("steal", by_node[sample.node] / np.maximum(sample.steps, 1))


@dataclass(frozen=True, slots=True)
class _Ground:
    """The evidence for a cause."""

    cause: SlowRankCause
    words: str
    sureness: float
    share: float = 1.0
    section: str | None = None
    signals: tuple[_Signal, ...] = ()


def blame(
    measured: Measured, row: int, change: Found, limits: SlownessLimits, is_usual: Array
) -> Blame:
    """The cause of a rank's loss, compared with the rows that define what is usual."""
    peers = _peers(measured, row, is_usual)
    own = _Signal("own", float(measured.own_s[row]), finite_median(measured.own_s[peers]))
    usual_loss = change.ratio * own.usual if np.isfinite(own.usual) else 0.0
    is_shown = own.excess > 0 and own.excess >= _SHOWN * usual_loss
    lost = max(own.excess if is_shown else usual_loss, 1e-9)
    case = _Case(measured, row, peers, lost)
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
        f"own time {own.value * 1e3:.1f} ms a step, {own.excess * 1e3:.1f} ms above the median of "
        f"{len(peers)} others in the latest window; {change.ratio * 100:.1f} % over "
        f"{change.windows} windows (limit {limit * 100:.1f} %); {ground.words}{place}"
    )
    clearness = min(1.0, change.ratio / (2 * limit)) if limit > 0 else 1.0
    return Blame(
        cause=ground.cause,
        reason=reason,
        section=ground.section,
        scores=(
            replace_score(own.score(), relative_score=1 / (1 + max(0.0, change.ratio))),
            *(signal.score() for signal in ground.signals),
        ),
        lost_s=lost,
        confidence=round(sureness * min(1.0, ground.share) * clearness, 3),
    )


def slow_sender(measured: Measured, row: int, trips: Array) -> int | None:
    """The row whose link keeps this one in collectives, by round trips of nodes; None if none does.

    In a ring each rank sends to the rank before it. If a rank's link is slow, the rank before it is
    the last to leave a collective, and has quick connections itself. The rank after it has slow
    connections, too: it sends to the rank with the slow link.
    """
    peers = _peers(measured, row)
    own = _Signal("own", float(measured.own_s[row]), finite_median(measured.own_s[peers]))
    case = _Case(measured, row, peers, max(own.excess, 1e-9))
    sender = _successor(measured, row)
    if sender is None or _device(case) or _host(case) or _compute(case):
        return None
    node = measured.sample.node
    if node[sender] == node[row]:
        return None  # there is no link between them
    own_s = float(np.nan_to_num(trips[node[row]]))
    more_s = trips[node[sender]] - own_s
    if not more_s > max((_RING_TRIPS - 1) * own_s, _RING_LEAST_S, _RING_OF_LOSS * case.lost_s):
        return None  # too little, or a loss that such a short delay cannot explain
    if _is_own(case, more_s):
        return None
    others = np.delete(trips, [node[sender], (node[sender] + 1) % len(trips)])
    return sender if trips[node[sender]] >= np.nanmax(others, initial=0.0) else None


def _is_own(case: _Case, more_s: float) -> bool:
    """Whether a section explains the excess in which no rank waits for others.

    If the section computes, and the processor did not, round trips explain it that grew by half.
    """
    section = next(iter(case.sections()), None)
    if section is None or section.excess < _EXPLAINS * case.lost_s:
        return False
    if cause_of(section.name) != "compute":
        return True
    if more_s >= _EXPLAINS * case.lost_s:
        return False
    column = case.measured.sections.names.index(section.name)
    return finite_median(case.measured.waits_inside[case.peers, column]) < 0.1 * case.lost_s


def _successor(measured: Measured, row: int) -> int | None:
    """The row that is next in the ring of the group that the rank has the most entries in."""
    if measured.entered is None:
        return None
    matched = measured.entered.entries
    groups, count = np.unique(matched.group[matched.row == row], return_counts=True)
    if not len(groups):
        return None
    rows = np.unique(matched.row[matched.group == groups[np.argmax(count)]])
    place = int(np.searchsorted(rows, row))
    return int(rows[(place + 1) % len(rows)]) if len(rows) > 2 else None


def _milliseconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if np.isfinite(value) else "unknown ones"


def from_link(measured: Measured, row: int, sender: int, trips: Array, why: Blame) -> Blame:
    """The same finding, about the rank whose link is slow."""
    node = measured.sample.node
    words = (
        f"round trips of its connections {trips[node[sender]] * 1e3:.2f} ms against "
        f"{_milliseconds(trips[node[row]])} of rank {int(measured.sample.rank[row])}, "
        f"which it sends to in a ring, and which is the last to leave collectives: {why.reason}"
    )
    return replace(why, cause="network", reason=words, section=None, confidence=_RING_CONFIDENCE)


def _peers(measured: Measured, row: int, is_usual: Array | None = None) -> Array:
    """Return the other rows of its role with a known own time; a sample of very many."""
    same = (measured.role == measured.role[row]) & np.isfinite(measured.own_s)
    same[row] = False
    if is_usual is not None and (same & is_usual).any():
        same &= is_usual
    peers = np.flatnonzero(same)
    return peers[:: max(1, len(peers) // _MOST_PEERS)]


def _device(case: _Case) -> _Ground | None:
    """The driver throttles the device, or its clock is below those of its peers."""
    sample = case.measured.sample
    clock = case.plain("clock_mhz")
    is_low = clock.value < _CLOCK * clock.usual
    throttled = [reason for node in sample.nodes for reason in node.throttled]
    order = np.concatenate([node.rank for node in sample.nodes])
    by_rank = dict(zip(order.tolist(), throttled, strict=True))
    mine = set(by_rank[int(sample.rank[case.row])])
    peers = [by_rank[int(sample.rank[peer])] for peer in case.peers[:64]]
    own = sorted(
        reason for reason in mine if sum(reason in peer for peer in peers) * 2 < len(peers)
    )
    if not own and not is_low:
        return None
    why = f"its device is throttled by {', '.join(own)}" if own else "its device is slow"
    at = f" at {clock.value:.0f} MHz against {clock.usual:.0f}" if np.isfinite(clock.value) else ""
    return _Ground("device", why + at, _SURE if own and is_low else _LIKELY)


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
    held_s = measured.signal(name) / np.maximum(measured.sample.steps, 1)
    return held_s - finite_median(held_s)


def from_host(why: Blame, held_s: float) -> Blame:
    """The finding with the host as its cause, if the host held the rank back for most of the loss.

    The kernel's figures of a host that is too busy may come a window late.
    """
    if why.cause != "unknown" or held_s < _EXPLAINS * why.lost_s:
        return why
    words = (
        f"its host kept it from running for {held_s * 1e3:.1f} ms a step more than others in one "
        f"of the latest windows"
    )
    return replace(why, cause="host", reason=f"{words}: {why.reason}", confidence=_LATE_CONFIDENCE)


def _host(case: _Case) -> _Ground | None:
    """Its thread was ready to run and did not run: other processes, a quota, or the hypervisor."""
    signals = [*(case.per_step(name) for name in _HOST), case.steal()]
    worst = max(signals, key=lambda signal: signal.excess)
    share = worst.excess / case.lost_s
    if share < _EXPLAINS:
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


def _network(case: _Case) -> _Ground | None:
    """Its connections are slow, and its processor is not."""
    if len(case.measured.sample.nodes) < 2:
        return None
    trip, again = case.plain("round_trip_s"), case.per_step("retransmits")
    is_long = trip.value > max(_ROUND_TRIPS * trip.usual, trip.usual + _LEAST_ROUND_TRIP_S)
    is_long = is_long and trip.excess > _OF_LOSS * case.lost_s
    is_lossy = again.excess > 1
    cpu = case.per_step("main_cpu_s", "cpu")
    if not (is_long or is_lossy) or cpu.excess > _EXPLAINS * case.lost_s:
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


def _memory(case: _Case) -> _Ground | None:
    """It waited for pages that were not in memory; the kernel tells how many these were."""
    faults, cpu = case.per_step("major_faults"), case.per_step("main_cpu_s", "cpu")
    explained_s = faults.excess * _FAULT_S
    if explained_s < _EXPLAINS * case.lost_s or cpu.excess > _EXPLAINS * case.lost_s:
        return None
    if case.is_input():
        return None  # a file of data that is mapped into memory
    words = f"{faults.value:.1f} major page faults a step against {faults.usual:.1f}"
    share = min(1.0, explained_s / case.lost_s)
    return _Ground("host", f"{words}: its memory was on a disk", _LIKELY, share)


def _section(case: _Case) -> _Ground | None:
    """One section has most of the excess: on the device, where that is known, or on the thread."""
    return _on_device(case) or _on_thread(case)


def _on_device(case: _Case) -> _Ground | None:
    worst = next(iter(case.device_sections()), None)
    if worst is None or worst.excess < _EXPLAINS * case.lost_s:
        return None
    words = (
        f"{_percent(worst, case)} of it in section {worst.name} on the device: {worst.shown()}, "
        f"without waiting for others"
    )
    signal = _Signal(f"device:{worst.name}", worst.value, worst.usual)
    share = worst.excess / case.lost_s
    return _Ground("compute", words, _LIKELY, share, worst.name, (signal,))


def _percent(signal: _Signal, case: _Case) -> str:
    return f"{min(signal.excess / case.lost_s, 1) * 100:.0f} %"


def _on_thread(case: _Case) -> _Ground | None:
    worst = next(iter(case.sections()), None)
    if worst is None or worst.excess < _EXPLAINS * case.lost_s:
        return None
    share = worst.excess / case.lost_s
    words = (
        f"{_percent(worst, case)} of it in section {worst.name}: {worst.shown()}, "
        f"without waiting for others"
    )
    signal = _Signal(f"section:{worst.name}", worst.value, worst.usual)
    return _Ground(cause_of(worst.name), words, _LIKELY, share, worst.name, (signal,))


def _compute(case: _Case) -> _Ground | None:
    """Its main thread had more to compute."""
    cpu = case.per_step("main_cpu_s", "cpu")
    share = cpu.excess / case.lost_s
    if share < _EXPLAINS:
        return None
    return _Ground(
        "compute", f"its main thread computed {cpu.shown()}", _LIKELY, share, None, (cpu,)
    )


def _outside(case: _Case) -> _Ground:
    """Neither its processor nor a section shows it."""
    cpu = case.per_step("main_cpu_s", "cpu")
    workers = case.per_step("workers_cpu_s", "workers")
    if workers.excess > _EXPLAINS * case.lost_s:
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
    table = next(
        (candidate for candidate in measured.entered.own.tables if row in candidate.rows), None
    )
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
