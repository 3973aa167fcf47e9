"""Process groups of a job, and the roles of its ranks by the groups that they are in."""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from everstep_services.straggler.domain.arrays import dense
from everstep_services.straggler.domain.live.samples import GroupIdentity, Names
from everstep_services.straggler.domain.live.windows import Sample
from everstep_services.straggler.domain.operations import Array
from everstep_services.straggler.domain.roles import EVERYBODY

Dimension = Literal["all", "data", "tensor", "pipeline", "expert", "context", ""]
_NAMES: tuple[tuple[Dimension, re.Pattern[str]], ...] = (
    ("expert", re.compile(r"(^|[^a-z])(ep|expert\w*|moe)([^a-z]|$)")),
    ("pipeline", re.compile(r"(^|[^a-z])(pp|pipe|pipeline\w*|stage)([^a-z]|$)")),
    ("tensor", re.compile(r"(^|[^a-z])(tp|mp|tensor\w*|model_parallel)([^a-z]|$)")),
    ("context", re.compile(r"(^|[^a-z])(cp|sp|context\w*|sequence_parallel)([^a-z]|$)")),
    ("data", re.compile(r"(^|[^a-z])(dp|ddp|fsdp|data\w*|replicate|shard)([^a-z]|$)")),
)
_POINT_TO_POINT = re.compile(r"(^|[^a-z])i?(send|recv)")
_MOST_KINDS = 62
_PEERS = 3


class Groups:
    """What is known of the groups of a round, by the numbers of `Vocabulary.groups`."""

    def __init__(self, world: int) -> None:
        self.world = world
        self._kinds = Names(_MOST_KINDS)
        self._forget()
        self.kind = np.full(0, -1, dtype=np.int32)
        """Of each group."""
        self.size = np.zeros(0, dtype=np.int32)
        """Of each group; the ranks seen where it is not known."""

    def _forget(self) -> None:
        self._mask = np.zeros(self.world, dtype=np.uint64)
        """The kinds of groups that each rank is in."""
        self._part = np.arange(self.world)
        """The lowest rank that groups smaller than all ranks connect each one with."""
        self._stage = np.full(self.world, -1, dtype=np.int32)
        self._expert = np.full(self.world, -1, dtype=np.int32)
        self._connects = False

    def learn(self, sample: Sample, names: Sequence[object], ops: Sequence[object]) -> None:
        """Take in which ranks use which groups in a window."""
        pairs = _pairs(sample, self.world)
        if not len(pairs):
            return
        group, rank = pairs // self.world, pairs % self.world
        distinct, first, count = np.unique(group, return_index=True, return_counts=True)
        if len(names) > len(self.kind):
            more = len(names) - len(self.kind)
            self.kind = np.concatenate([self.kind, np.full(more, -1, dtype=np.int32)])
            self.size = np.concatenate([self.size, np.zeros(more, dtype=np.int32)])
        described = self.kind[distinct] >= 0
        if (described & (self.size[distinct] < count)).any():
            # A group is larger than it seemed while not all of its ranks were heard.
            self._forget()
            self.kind[:] = -1
        passing = _passing(sample, ops, len(names))
        for number, start, seen in zip(distinct, first, count, strict=True):
            if self.kind[number] >= 0 and self.size[number] >= seen:
                continue
            group_name = names[number]
            assert isinstance(group_name, GroupIdentity)
            members = rank[start : start + seen]
            self._describe(int(number), group_name, members, is_passing=bool(passing[number]))
        self._join(group, rank)

    def _describe(
        self, number: int, group: GroupIdentity, seen: Array, *, is_passing: bool
    ) -> None:
        members = np.array(group.members if group.members else seen, dtype=np.int64)
        size = group.size or len(seen)
        dimension = _dimension(group.name, size, self.world, is_passing=is_passing)
        stride = int(members[1] - members[0]) if len(members) > 1 else 0
        key = (dimension,) if dimension else (dimension, size, stride)
        self.size[number] = size
        self.kind[number] = self._kinds.number(key)
        if size < 2 or self.kind[number] < 0:
            return
        inside = members[members < self.world]
        self._mask[inside] |= np.uint64(1 << int(self.kind[number]))
        if dimension in ("pipeline", "expert") and len(members) == size:
            place = self._stage if dimension == "pipeline" else self._expert
            place[inside] = np.arange(len(inside))

    def _join(self, group: Array, rank: Array) -> None:
        """Connect ranks by the groups that are smaller than the job."""
        loose = [
            number
            for number, key in enumerate(self._kinds.names())
            if isinstance(key, tuple) and key[0] in ("expert", "pipeline", "all")
        ]
        counts = ~np.isin(self.kind[group], loose) & (self.size[group] > 1)
        counts &= self.size[group] < self.world
        if not counts.any():
            return
        self._connects = True
        index, member = dense(group[counts])[1], rank[counts]
        for _ in range(64):
            lowest = np.full(int(index.max()) + 1, self.world)
            np.minimum.at(lowest, index, self._part[member])
            before = self._part.copy()
            np.minimum.at(self._part, member, lowest[index])
            if (self._part == before).all():
                return

    def roles(
        self, rank: Array, declared: Array, names: Sequence[object]
    ) -> tuple[Array, list[str]]:
        """The number of each rank's role, and the name of each role.

        By what is declared, if each rank has declared a role, else by groups.
        """
        if len(rank) and (declared >= 0).all():
            distinct, index = dense(declared)
            return index, [str(names[int(name)]) for name in distinct]
        part = self._part[rank] if self._connects else np.zeros(len(rank), dtype=np.int64)
        keys = np.stack([
            self._mask[rank].astype(np.int64), part, self._stage[rank], self._expert[rank],
        ], axis=1)  # fmt: skip
        distinct, first, index, count = np.unique(
            keys, axis=0, return_index=True, return_inverse=True, return_counts=True
        )
        is_staged = len(np.unique(keys[:, 2:], axis=0)) > 1
        if len(distinct) <= 1 or (count.max() < _PEERS and not is_staged):
            return np.zeros(len(rank), dtype=np.int64), [EVERYBODY]
        named = [
            _name(int(key[2]), int(key[3]), int(rank[row]))
            for key, row in zip(distinct, first, strict=True)
        ]
        return index.reshape(-1), _distinct_names(named, rank[first])


def _pairs(sample: Sample, world: int) -> Array:
    """Each group and rank that belong together, as `group × world + rank`, in order."""
    if not len(sample.entry_row):
        return np.empty(0, dtype=np.int64)
    key = sample.entry_group.astype(np.int64) * world + sample.rank[sample.entry_row]
    begins = np.flatnonzero(np.r_[True, key[1:] != key[:-1]])
    distinct = np.unique(key[begins])
    return distinct[distinct >= 0]


def _passing(sample: Sample, ops: Sequence[object], groups: int) -> Array:
    """The groups in which ranks send to single other ranks."""
    is_passing = np.zeros(groups, dtype=bool)
    transfers = sample.entry_group[sample.entry_is_transfer]
    is_passing[np.unique(transfers[transfers >= 0])] = True
    sends = np.array([bool(_POINT_TO_POINT.search(str(op).lower())) for op in ops] or [False])
    if sends.any():
        at = (sample.entry_op >= 0) & (sample.entry_group >= 0)
        at[at] = sends[sample.entry_op[at]]
        is_passing[np.unique(sample.entry_group[at])] = True
    return is_passing


def _dimension(name: str, size: int, world: int, *, is_passing: bool) -> Dimension:
    plain = name.lower()
    for dimension, pattern in _NAMES:
        if pattern.search(plain):
            return dimension
    if is_passing and 1 < size < world:
        return "pipeline"
    return "all" if size == world else ""


def _name(stage: int, expert: int, lowest: int) -> str:
    parts = [f"stage {stage}"] if stage >= 0 else []
    parts += [f"expert {expert}"] if expert >= 0 else []
    return ", ".join(parts) or f"like rank {lowest}"


def _distinct_names(names: list[str], lowest: Array) -> list[str]:
    """The names, with a rank where two roles would have one."""
    return [
        name if names.count(name) == 1 else f"{name}, like rank {int(rank)}"
        for name, rank in zip(names, lowest, strict=True)
    ]
