"""A table of operations: what each rank did in each step, from when on and for how long."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from everstep.slow_rank_causes import SlowRankCause

Array = npt.NDArray[Any]


class OperationKind(IntEnum):
    COMPUTE = 0
    COLLECTIVE = 1
    SEND = 2
    RECEIVE = 3
    WAIT = 4


_TORCH_OWN = re.compile(r"aten::|autograd::|torch::")
_KINDS = (
    (OperationKind.WAIT, re.compile(r"(^|[^a-z])(wait|idle|bubble)([^a-z]|$)")),
    (OperationKind.SEND, re.compile(r"(^|[^a-z])i?send([^a-z]|$)")),
    (OperationKind.RECEIVE, re.compile(r"(^|[^a-z])i?rec(v|eive)([^a-z]|$)")),
    (
        OperationKind.COLLECTIVE,
        re.compile(
            r"all_?reduce|all_?gather|reduce_?scatter|broadcast|all_?to_?all|barrier|nccl"
            r"|gloo:|c10d::|collective|(^|[^a-z])(reduce|scatter|gather)([^a-z]|$)"
        ),
    ),
)
_OF_ALL = re.compile(r"clip_(main_)?grad|grad_norm|barrier")
_INPUT = re.compile(
    r"(^|[^a-z])(data|dataloader|input|batch|tokeniz\w*|h2d|fetch|prefetch|loader)([^a-z]|$)|dataload"
)
_HOST = re.compile(r"(^|[^a-z])(gc|garbage|checkpoint|ckpt|save|log|logging|host|python)([^a-z]|$)")
_FORWARD = re.compile(r"(^|[^a-z])(forward|fwd|f)([^a-z]|$)")
_BACKWARD = re.compile(r"(^|[^a-z])(backward|bwd|b|dgrad)([^a-z]|$)")

_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def plain_name(name: str) -> str:
    """A name in small letters, with its words set apart: `recvForward` is `recv_forward`."""
    return _CAMEL.sub("_", name).lower()


def is_of_all(name: str) -> bool:
    """Whether an operation joins all ranks by its name, whatever groups others have."""
    return _OF_ALL.search(plain_name(name).replace("-", "_")) is not None


def kind_of(name: str) -> OperationKind:
    """What an operation is, by its name."""
    plain = plain_name(name)
    if is_of_all(name):
        return OperationKind.COLLECTIVE
    if _TORCH_OWN.match(plain):
        return OperationKind.COMPUTE
    return next((kind for kind, pattern in _KINDS if pattern.search(plain)), OperationKind.COMPUTE)


BETWEEN_CALLS = "time between calls"
"""What a rank does itself where its trace knows calls only."""


def cause_of(name: str) -> SlowRankCause:
    """The cause if a computation of this name is slow."""
    if name == BETWEEN_CALLS:
        return "unknown"
    plain = plain_name(name)
    if _INPUT.search(plain):
        return "input"
    return "host" if _HOST.search(plain) else "compute"


def direction_of(name: str) -> int:
    """1 for forward, -1 for backward, 0 for neither."""
    plain = plain_name(name)
    if _FORWARD.search(plain):
        return 1
    return -1 if _BACKWARD.search(plain) else 0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is in a parallel training; None for what is not known."""

    data: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class Operations:
    """Columns of equal length, a row an operation. Times are in seconds."""

    rank: Array
    step: Array
    op: Array
    """An index into `ops`."""
    start: Array
    duration: Array
    group: Array
    """An index into `groups`; -1 for none."""
    microbatch: Array
    """-1 for none."""
    sequence: Array
    """The number of a collective within its group; -1 where it is not known."""
    tokens: Array | None = None
    """The operation's amount of work; NaN where it is not known."""
    gap: Array | None = None
    """What the trace shows of the time before the operation in which its rank did nothing that is
    in the table: an index into `ops`, -1 where it shows nothing."""
    ops: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    members: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """The ranks of a group, where the trace names them."""
    roles: Mapping[int, str] = field(default_factory=dict)
    """Declared roles of ranks."""
    places: Mapping[int, Place] = field(default_factory=dict)
    hosts: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def end(self) -> Array:
        ends: Array = self.start + self.duration
        return ends

    def kinds(self) -> Array:
        """The kind of each row."""
        by_name = np.array(
            [kind_of(name) for name in self.ops] or [OperationKind.COMPUTE], dtype=np.int8
        )
        kinds: Array = by_name[self.op]
        return kinds

    def take(self, rows: Array) -> "Operations":
        """The table with these rows only, in this order."""
        return replace(
            self,
            rank=self.rank[rows],
            step=self.step[rows],
            op=self.op[rows],
            start=self.start[rows],
            duration=self.duration[rows],
            group=self.group[rows],
            microbatch=self.microbatch[rows],
            sequence=self.sequence[rows],
            tokens=None if self.tokens is None else self.tokens[rows],
            gap=None if self.gap is None else self.gap[rows],
        )


_ROUNDED_S = 2e-5


def without_enclosing(table: Operations) -> tuple[Operations, int]:
    """The table without waits, and without computations that enclose other operations.

    Returns how many enclosing ones were left out: their time is that of what they enclose, and
    the gaps between are time outside of all operations.
    """
    kinds = table.kinds()
    rows = np.flatnonzero(kinds != OperationKind.WAIT)
    order = rows[np.lexsort((-table.duration[rows], table.start[rows], table.rank[rows]))]
    computing = order[kinds[order] == OperationKind.COMPUTE]
    rank, start, end = table.rank[computing], table.start[computing], table.end[computing]
    # Times are rounded: what begins just before another ends, or lasts no time, is not within it.
    inner = np.maximum(np.minimum(_ROUNDED_S, table.duration[computing][:-1] / 20), 1e-9)
    encloses = (rank[1:] == rank[:-1]) & (start[1:] < end[:-1] - inner) & (end[1:] <= end[:-1])
    encloses &= table.duration[computing][1:] > 0
    outer = computing[:-1][encloses]
    keep = np.ones(len(table), dtype=bool)
    keep[kinds == OperationKind.WAIT] = False
    keep[outer] = False
    return table.take(np.flatnonzero(keep)), len(outer)
