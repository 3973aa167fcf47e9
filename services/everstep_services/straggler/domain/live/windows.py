"""Windows: gathered from nodes until they close, their sections as tables, and the newest ones."""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from everstep.messages import NodeTimings
from everstep_services.straggler.domain.live.samples import (
    MOST_WORLD,
    NodeSample,
    SampleTable,
    Vocabulary,
    sample_of,
)
from everstep_services.straggler.domain.operations import Array

MOST_OPEN = 8
"""Windows that wait for nodes; the oldest closes when there are more."""
_MOST_STEP = 1 << 50


@dataclass(slots=True)
class Gathered:
    """What the nodes have sent of one window."""

    first_step: int
    last_step: int
    since_s: float
    """When the first node's window came, by our own clock."""
    samples: dict[int, NodeSample] = field(default_factory=dict)
    """By slot."""


class Windows:
    """The open windows of one round."""

    def __init__(self, round_number: int, refused: Counter[str]) -> None:
        self.round = round_number
        self.slots = 0
        self.world = 0
        self.names = Vocabulary()
        self._open: dict[int, Gathered] = {}
        self._closed = 0
        """The last step of the newest window that has been closed."""
        self._refused = refused

    def take(self, timings: NodeTimings, now: float) -> None:
        """Add a node's window to those that end with the same step."""
        reason = self._objection(timings)
        if reason:
            self._refused[reason] += 1
            return
        self.slots, self.world = timings.slots, timings.world
        last = timings.last_step
        window = self._open.get(last)
        if window is None:
            window = self._open[last] = Gathered(timings.first_step, last, now)
        window.first_step = min(window.first_step, timings.first_step)
        window.samples[timings.slot] = sample_of(timings, self.names, self._refused)

    def _objection(self, timings: NodeTimings) -> str:
        first, last = timings.first_step, timings.last_step
        if not 0 < timings.world <= MOST_WORLD or not timings.slot < timings.slots <= MOST_WORLD:
            return "absurd round"
        if not 0 < first <= last < _MOST_STEP:
            return "absurd steps"
        if last <= self._closed:
            return "late window"
        window = self._open.get(last)
        return "duplicate window" if window and timings.slot in window.samples else ""

    def due(self, now: float, grace_s: float) -> list[Gathered]:
        """Close the windows that are complete or overdue, and those before them."""
        ordered = sorted(self._open)
        closing = max(0, len(ordered) - MOST_OPEN)
        for place, last in enumerate(ordered):
            window = self._open[last]
            is_complete = len(window.samples) >= self.slots
            if is_complete or now - window.since_s >= grace_s:
                closing = max(closing, place + 1)
        closed = [self._open.pop(last) for last in ordered[:closing]]
        for window in closed:
            # A single node that counts wrongly must not make all others late.
            if len(window.samples) * 2 >= self.slots:
                self._closed = max(self._closed, window.last_step)
        return closed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(SampleTable):
    """A closed window of all nodes: a row a rank, in the order of ranks."""

    first_step: int
    last_step: int
    nodes: tuple[NodeSample, ...]
    node: Array
    """The index of each rank's node."""

    @property
    def gaps(self) -> dict[int, str]:
        """By rank, why measurements of it are missing; empty where none are."""
        pairs = (zip(node.rank.tolist(), node.gaps, strict=True) for node in self.nodes)
        return {rank: gap for of_node in pairs for rank, gap in of_node}


_ENTRY = (
    "entry_group", "entry_sequence", "entry_us", "entry_op", "entry_section", "entry_lasted_us",
    "entry_is_transfer",
)  # fmt: skip


def joined(window: Gathered, refused: Counter[str]) -> Sample:
    """The nodes' rows as one table; a rank that two nodes claim is that of the first."""
    nodes = tuple(window.samples[slot] for slot in sorted(window.samples))
    claimed = np.concatenate([node.rank for node in nodes])
    node = np.repeat(np.arange(len(nodes)), [len(node.rank) for node in nodes])
    rank, kept = np.unique(claimed, return_index=True)
    if len(claimed) > len(rank):
        refused["rank that another node has"] += len(claimed) - len(rank)
    row_of = np.full(len(claimed), -1, dtype=np.int32)
    row_of[kept] = np.arange(len(rank), dtype=np.int32)
    firsts = np.cumsum([0, *(len(node.rank) for node in nodes)])

    def rows(name: str) -> Array:
        together: Array = np.concatenate([getattr(node, name) for node in nodes])
        return together[kept]

    def table(name: str) -> Array:
        parts = []
        for node, first in zip(nodes, firsts, strict=False):
            part = getattr(node, name).copy()
            part[:, 0] = row_of[part[:, 0].astype(np.int64) + first]
            parts.append(part)
        whole: Array = np.concatenate(parts)
        return whole[whole[:, 0] >= 0]

    entry_row = row_of[
        np.concatenate([node.entry_row + first for node, first in zip(nodes, firsts, strict=False)])
    ]
    valid = entry_row >= 0
    entries = {
        name: np.concatenate([getattr(node, name) for node in nodes])[valid] for name in _ENTRY
    }
    return Sample(
        first_step=window.first_step, last_step=window.last_step, nodes=nodes, rank=rank,
        node=node[kept], step_s=rows("step_s"), steps=rows("steps"), role=rows("role"),
        signals=rows("signals"), sections=table("sections"), kernels=table("kernels"),
        entry_row=entry_row[valid], **entries,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sections:
    """The times of sections in seconds; NaN where a rank does not have a section."""

    names: tuple[str, ...]
    numbers: Array
    """Of each column, the number in the vocabulary."""
    medians: Array
    """Of the wall time, each time."""
    wall_s: Array
    """In a step, the longest time left out where there are many."""
    cpu_s: Array
    """In a step."""
    device_s: Array
    """In a step."""


def sections_of(sample: Sample, names: list[object]) -> Sections:
    """The sections of a window as tables."""
    part = sample.sections
    numbers, column = np.unique(part[:, 1].astype(np.int64), return_inverse=True)
    row = part[:, 0].astype(np.int64)
    steps = np.maximum(sample.steps, 1)[row]
    count, total, longest = part[:, 2], part[:, 3], part[:, 4]
    trimmed = np.where(count > 3, (total - longest) / np.maximum(count - 1, 1) * count, total)

    def table(values: Array) -> Array:
        table = np.full((len(sample.rank), len(numbers)), np.nan)
        table[row, column] = values
        return table

    return Sections(
        names=tuple(str(names[int(number)]) for number in numbers),
        numbers=numbers,
        medians=table(part[:, 5]),
        wall_s=table(trimmed / steps),
        cpu_s=table(np.where(part[:, 6] > 0, part[:, 7] / steps, np.nan)),
        device_s=table(np.where(part[:, 8] > 0, part[:, 9] / steps, np.nan)),
    )


_MOST_VALUES = 24_000_000
"""Of four bytes each."""
_LEAST = 4


@dataclass(frozen=True, slots=True)
class Kept:
    """One window: each measure by rank, NaN where it is not known."""

    first_step: int
    last_step: int
    measures: Mapping[str, Array]
    sections: Mapping[int, Array]


@dataclass(slots=True)
class WindowHistory:
    """The latest windows, the newest last."""

    windows: deque[Kept] = field(default_factory=deque)
    _values: int = 0

    def add(self, window: Kept, most: int) -> None:
        """Keep one more window, and fewer old ones where ranks are many."""
        self.windows.append(window)
        self._values += _size(window)
        while len(self.windows) > most or (
            self._values > _MOST_VALUES and len(self.windows) > _LEAST
        ):
            self._values -= _size(self.windows.popleft())

    def table(self, measure: str, section: int, windows: int, ranks: slice) -> Array:
        """Windows × ranks, the oldest first."""
        rows = []
        for window in list(self.windows)[-windows:] if windows else []:
            values = window.sections.get(section) if measure == "section" else (
                window.measures.get(measure)
            )  # fmt: skip
            width = len(window.measures["own"][ranks])
            rows.append(np.full(width, np.nan) if values is None else values[ranks])
        return np.array(rows)


def _size(window: Kept) -> int:
    return sum(len(values) for values in (*window.measures.values(), *window.sections.values()))
