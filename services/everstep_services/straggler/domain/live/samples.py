"""One node's window as columns of numbers; values that make no sense are refused and counted."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Final

import numpy as np

from everstep.messages import (
    ClockOffset,
    CollectiveEntries,
    KernelTiming,
    NodeTimings,
    RankTiming,
    SectionTiming,
    Sketch,
)
from everstep.messages.beats.sketch import BUCKETS_PER_DOUBLING
from everstep_services.straggler.domain.operations import Array

MOST_WORLD: Final = 1 << 20
MOST_RANKS: Final = 4096
"""Of one node."""
MOST_ENTRIES: Final = 64
"""Of one rank: collectives, and as many transfers."""
MOST_SECTIONS: Final = 64
MOST_NAMES: Final = 4096
MOST_GROUPS: Final = 1 << 20
MOST_KERNELS: Final = 256
_MOST_S: Final = 1e7
_MOST_US: Final = 10**13
_MOST_CLOCK_S: Final = 1e11
_MOST_SEQUENCE: Final = 1 << 62
_MEMBERS_COMPARED: Final = 64
_MOST_BUCKET: Final = 512
_MIDDLES: Final = tuple(
    2 ** ((index - 0.5) / BUCKETS_PER_DOUBLING) for index in range(-_MOST_BUCKET, _MOST_BUCKET + 1)
)
"""Of each bucket of a sketch its middle, from the lowest on."""

HOST: Final = (
    "cpu_s", "main_cpu_s", "runnable_s", "involuntary_switches", "major_faults", "cpu_pressure_s",
    "memory_pressure_s", "io_pressure_s", "throttled_s", "workers", "workers_cpu_s", "retransmits",
    "round_trip_s", "unsent_bytes",
)  # fmt: skip
"""The columns of `NodeSample.host`, then those of `DEVICE`."""
DEVICE: Final = ("clock_mhz", "clock_most_mhz", "power_watts", "temperature_celsius")
SIGNALS: Final = {name: number for number, name in enumerate((*HOST, *DEVICE))}
SHOWN_SIGNALS: Final = {"cpu": "main_cpu_s", "runnable": "runnable_s"}
"""The names of the signals that people see."""
_host_of = attrgetter(*HOST)
_device_of = attrgetter(*DEVICE)
_NO_HOST: Final = (None,) * len(HOST)
_NO_DEVICE: Final = (None,) * len(DEVICE)

SECTION_COLUMNS: Final = 10
"""Row, section, count, sum, longest and median of the wall time; count and sum of processor and
of device time."""


class Names:
    """Numbers for names, in the order in which they are first seen."""

    def __init__(self, most: int) -> None:
        self._numbers: dict[object, int] = {}
        self._most = most

    def number(self, name: object) -> int:
        """The number of this name; -1 when there are too many."""
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) >= self._most:
                return -1
            number = self._numbers[name] = len(self._numbers)
        return number

    def names(self) -> list[object]:
        return list(self._numbers)

    def __len__(self) -> int:
        return len(self._numbers)


@dataclass(slots=True)
class Vocabulary:
    """The names that a job's messages use."""

    ops: Names = field(default_factory=lambda: Names(MOST_NAMES))
    sections: Names = field(default_factory=lambda: Names(MOST_SECTIONS))
    groups: Names = field(default_factory=lambda: Names(MOST_GROUPS))
    """By name and members: `(name, members)`, members shortened where there are many."""
    roles: Names = field(default_factory=lambda: Names(MOST_NAMES))
    kernels: Names = field(default_factory=lambda: Names(MOST_KERNELS))


@dataclass(frozen=True, slots=True)
class GroupIdentity:
    """What tells one process group from all others."""

    name: str
    members: tuple[int, ...]
    """All of them; of large groups the first ones and the last; empty where not known."""
    size: int
    """0 where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTable:
    """A window: a row a rank, a row a section or kernel of a rank, a row an entry."""

    rank: Array
    steps: Array
    step_s: Array
    role: Array
    """The number of the declared role; -1 for none."""
    signals: Array
    """Ranks × (`HOST`, `DEVICE`)."""
    sections: Array
    """Rows of `SECTION_COLUMNS` numbers."""
    kernels: Array
    """Rows of rank's row, kernel, count, median and mean."""
    entry_row: Array
    entry_group: Array
    entry_sequence: Array
    entry_us: Array
    """Microseconds since 1970 by the node's clock."""
    entry_op: Array
    entry_section: Array
    entry_lasted_us: Array
    """-1 where it is not known."""
    entry_is_transfer: Array
    """Its sequence is the rank's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample(SampleTable):
    """One node's window."""

    node: str
    slot: int
    clocks: tuple[ClockOffset, ...]
    steal_s: float
    gaps: tuple[str, ...]
    throttled: tuple[tuple[str, ...], ...]


def sample_of(timings: NodeTimings, names: Vocabulary, refused: Counter[str]) -> NodeSample:
    """A message in columns; values that make no sense are left out and counted."""
    ranks = _ranks(timings, refused)
    steps = np.array([min(rank.steps, 1 << 40) for rank in ranks], dtype=np.float64)
    runs = _Runs(names, refused)
    sections: list[tuple[float, ...]] = []
    kernels: list[tuple[float, ...]] = []
    for row, rank in enumerate(ranks):
        known_sections = _sections(row, rank.sections, names, sections, refused)
        runs.add(row, rank, known_sections)
        kernels += [_kernel(row, kernel, names) for kernel in rank.kernels[:MOST_KERNELS]]
    signals = [
        (*(_NO_HOST if rank.host is None else _host_of(rank.host)),
         *(_NO_DEVICE if rank.device is None else _device_of(rank.device)))
        for rank in ranks
    ]  # fmt: skip
    expected = timings.last_step - timings.first_step + 1
    return NodeSample(
        node=timings.node,
        slot=timings.slot,
        clocks=tuple(clock for clock in timings.clocks[:64] if _is_clock(clock, refused)),
        steal_s=_seconds(timings.host_steal_s, refused),
        rank=np.array([rank.rank for rank in ranks], dtype=np.int64),
        steps=steps,
        step_s=_step_s(ranks, steps, _seconds(timings.window_s, refused) / expected, refused),
        role=np.array(
            [names.roles.number(rank.role[:512]) if rank.role else -1 for rank in ranks],
            dtype=np.int32,
        ),
        gaps=tuple(rank.gap[:256] for rank in ranks),
        signals=_checked(signals, len(HOST) + len(DEVICE), refused),
        throttled=tuple(() if rank.device is None else rank.device.throttled_by for rank in ranks),
        sections=np.array(sections, dtype=np.float64).reshape(-1, SECTION_COLUMNS),
        kernels=np.array(kernels, dtype=np.float64).reshape(-1, 5),
        **runs.columns(),
    )


def _ranks(timings: NodeTimings, refused: Counter[str]) -> list[RankTiming]:
    """The ranks of a message, each once, without those that the round does not have."""
    timings_by_rank: dict[int, RankTiming] = {}
    for timing in timings.ranks:
        if (
            timing.rank >= timings.world
            or timing.rank in timings_by_rank
            or len(timings_by_rank) >= MOST_RANKS
        ):
            refused["rank that the round does not have"] += 1
            continue
        timings_by_rank[timing.rank] = timing
    return list(timings_by_rank.values())


def _seconds(value: float | None, refused: Counter[str]) -> float:
    if value is None:
        return math.nan
    if not 0 <= value < _MOST_S:
        refused["absurd duration"] += 1
        return math.nan
    return value


def _step_s(
    ranks: Sequence[RankTiming], steps: Array, usual: float, refused: Counter[str]
) -> Array:
    lengths = np.array([rank.window_s for rank in ranks], dtype=np.float64)
    with np.errstate(invalid="ignore"):
        bad = ~((lengths >= 0) & (lengths < _MOST_S))
    if bad.any():
        refused["absurd duration"] += int(bad.sum())
        lengths[bad] = 0.0
    usual = usual if usual > 0 else math.nan
    measured = (lengths > 0) & (steps > 0)
    return np.where(measured, lengths / np.maximum(steps, 1), usual)


def _is_clock(offset: ClockOffset, refused: Counter[str]) -> bool:
    is_plain = 0 <= offset.error_s < _MOST_S and abs(offset.offset_s) < 1e12
    if not is_plain:
        refused["absurd clock"] += 1
    return is_plain


def _checked(rows: list[tuple[object, ...]], columns: int, refused: Counter[str]) -> Array:
    table = np.array(rows, dtype=np.float64).reshape(-1, columns)
    with np.errstate(invalid="ignore"):
        bad = ~((table >= 0) & (table < 1e18)) & ~np.isnan(table)
    if bad.any():
        refused["absurd signal"] += int(bad.sum())
        table[bad] = np.nan
    return table


def _sections(
    row: int,
    sections: Sequence[SectionTiming],
    names: Vocabulary,
    into: list[tuple[float, ...]],
    refused: Counter[str],
) -> list[int]:
    """Add a rank's sections. Returns the number of each, by its place."""
    numbers = []
    number_of = names.sections.number
    for section in sections[:MOST_SECTIONS]:
        number = number_of(section.section)
        numbers.append(number)
        wall, cpu, device = section.wall, section.cpu, section.device
        if number < 0 or not _is_plain(wall):
            refused["section past the most" if number < 0 else "absurd section"] += 1
            continue
        if cpu is not None and not _is_plain(cpu):
            cpu = None
        if device is not None and not _is_plain(device):
            device = None
        into.append((
            row, number, wall.count, wall.sum_s, wall.max_s, _median(wall),
            cpu.count if cpu else 0, cpu.sum_s if cpu else 0,
            device.count if device else 0, device.sum_s if device else 0,
        ))  # fmt: skip
    return numbers


def _is_plain(sketch: Sketch) -> bool:
    """Whether the numbers of a sketch are possible."""
    if not 0 < sketch.count < 1 << 40:
        return False
    return 0 <= sketch.min_s <= sketch.max_s <= sketch.sum_s * 1.001 + 1e-9 < _MOST_S


def _median(sketch: Sketch) -> float:
    """As `Sketch.quantile_s`, for numbers that nobody has checked."""
    wanted = (sketch.count + 1) // 2
    for index, count in sketch.buckets:
        wanted -= count
        if wanted <= 0:
            if not -_MOST_BUCKET <= index <= _MOST_BUCKET:
                break
            middle = _MIDDLES[index + _MOST_BUCKET]
            if middle < sketch.min_s:
                return sketch.min_s
            return middle if middle < sketch.max_s else sketch.max_s
    return sketch.max_s


def _kernel(row: int, kernel: KernelTiming, names: Vocabulary) -> tuple[float, ...]:
    times = (kernel.median_s, kernel.average_s)
    is_plain = all(0 <= time < _MOST_S for time in times) and kernel.count > 0
    number = names.kernels.number(kernel.kernel[:128])
    return (row, number if is_plain else -1, kernel.count if is_plain else 0, *times)


TRANSFERS: Final = " transfers"
"""Follows the name of a process group: what goes from one of its ranks to another."""
_NUMBERS: Final = list(range(MOST_SECTIONS))


class _Runs:
    """Gathers runs of entries, and their columns."""

    def __init__(self, names: Vocabulary, refused: Counter[str]) -> None:
        self._names = names
        self._refused = refused
        self._runs: list[tuple[int, int, int, int, int, bool]] = []
        self._us: list[tuple[int, ...]] = []
        self._ops: list[Iterable[int]] = []
        self._sections: list[Iterable[int]] = []
        self._lasted: list[Iterable[int]] = []
        self._groups: dict[object, int] = {}

    def add(self, row: int, timing: RankTiming, sections: list[int]) -> None:
        """Take the entries of one rank, if all of them are possible."""
        left = {False: MOST_ENTRIES, True: MOST_ENTRIES}
        if not 0 <= timing.entries_from_s < _MOST_CLOCK_S:
            self._refused["absurd clock"] += 1
            return
        from_us = round(timing.entries_from_s * 1e6)
        for run in timing.collectives:
            kept = min(left[run.are_transfers], len(run.entered_us))
            left[run.are_transfers] -= kept
            if kept and self._is_plain(run):
                self._add((row, timing.rank), run, kept, from_us, sections)

    def _is_plain(self, run: CollectiveEntries) -> bool:
        times = run.entered_us
        is_plain = (
            times[0] > -_MOST_US and times[-1] < _MOST_US and run.first_sequence >= 0
            and run.first_sequence < _MOST_SEQUENCE and list(times) == sorted(times)
        )  # fmt: skip
        if not is_plain:
            self._refused["absurd entries"] += 1
        return is_plain

    def _add(
        self,
        place: tuple[int, int],
        run: CollectiveEntries,
        kept: int,
        from_us: int,
        sections: list[int],
    ) -> None:
        row, rank = place
        drop = len(run.entered_us) - kept
        group = self._group(run, rank)
        first = run.first_sequence + drop
        self._runs.append((row, group, first, kept, from_us, run.are_transfers))
        self._us.append(run.entered_us[drop:] if drop else run.entered_us)
        numbers = [self._names.ops.number(op[:512]) for op in run.ops[:MOST_ENTRIES]]
        self._ops.append(_mapped(run.op, numbers, drop, kept))
        self._sections.append(_mapped(run.section, sections, drop, kept))
        lasted = run.lasted_us[drop:]
        self._lasted.append(lasted if len(lasted) == kept else (-1,) * kept)

    def _group(self, run: CollectiveEntries, rank: int) -> int:
        members = run.members
        size = len(members)
        if size > _MEMBERS_COMPARED:
            members = (*members[: _MEMBERS_COMPARED - 1], members[-1])
        elif size and rank not in members:
            members, size = (), 0
            self._refused["group without the rank"] += 1
        if size and not 0 <= min(members) <= max(members) < MOST_WORLD:
            members, size = (), 0
            self._refused["absurd group"] += 1
        name = f"{run.group[:512]}{TRANSFERS}" if run.are_transfers else run.group[:512]
        return self._names.groups.number(GroupIdentity(name, members, size))

    def columns(self) -> dict[str, Array]:
        runs = np.array(self._runs, dtype=np.int64).reshape(-1, 6)
        count = runs[:, 3]
        total = int(count.sum())
        within = np.arange(total) - np.repeat(np.cumsum(count) - count, count)

        def flat(values: list[Iterable[int]], kind: type[np.generic]) -> Array:
            return np.fromiter(chain.from_iterable(values), dtype=kind, count=total)

        us = np.fromiter(chain.from_iterable(self._us), dtype=np.int64, count=total)
        lasted = np.clip(flat(self._lasted, np.int64), -1, _MOST_US)
        return {
            "entry_row": np.repeat(runs[:, 0], count).astype(np.int32),
            "entry_group": np.repeat(runs[:, 1], count).astype(np.int32),
            "entry_sequence": np.repeat(runs[:, 2], count) + within,
            "entry_us": us + np.repeat(runs[:, 4], count),
            "entry_op": flat(self._ops, np.int32),
            "entry_section": flat(self._sections, np.int32),
            "entry_lasted_us": lasted,
            "entry_is_transfer": np.repeat(runs[:, 5], count).astype(bool),
        }


def _mapped(places: tuple[int, ...], numbers: list[int], drop: int, kept: int) -> Iterable[int]:
    """The numbers at these places; -1 for those that are not known."""
    if len(places) != drop + kept or not numbers:
        return (-1,) * kept
    most = len(numbers)
    if min(places) < 0 or max(places) >= most:
        return [numbers[place] if 0 <= place < most else -1 for place in places[drop:]]
    if numbers == _NUMBERS[:most]:  # as in most messages: the places are the numbers
        return places[drop:] if drop else places
    return [numbers[place] for place in places[drop:]]
