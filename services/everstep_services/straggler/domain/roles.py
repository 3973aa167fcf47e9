"""Role groups: ranks that do the same work, and may be compared."""

import numpy as np

from everstep_services.straggler.domain.arrays import combined, dense
from everstep_services.straggler.domain.operations import Array, OperationKind, Operations

EVERYBODY = "all ranks"


def role_groups(table: Operations) -> dict[int, str]:
    """The role of each rank: declared, or its pipeline stage, or inferred from what it does."""
    ranks = [int(rank) for rank in np.unique(table.rank)]
    if all(rank in table.roles for rank in ranks):
        return {rank: table.roles[rank] for rank in ranks}
    places = {rank: table.places.get(rank) for rank in ranks}
    stages = {rank: place.pipeline for rank, place in places.items() if place is not None}
    if len(stages) == len(ranks) and all(stage is not None for stage in stages.values()):
        if len(set(stages.values())) == 1:
            return dict.fromkeys(ranks, EVERYBODY)
        return {rank: f"stage {stages[rank]}" for rank in ranks}
    return _inferred(table, ranks)


def _inferred(table: Operations, ranks: list[int]) -> dict[int, str]:
    """In a pipeline, ranks that do the same operations and that a collective's group connects.

    Without any send or receive all ranks do the same: an operation that one of them lacks is
    chance, or why it is slow.
    """
    kinds = table.kinds()
    if not np.isin(kinds, (OperationKind.SEND, OperationKind.RECEIVE)).any():
        return dict.fromkeys(ranks, EVERYBODY)
    parts = _joined(table, np.asarray(ranks), kinds == OperationKind.COLLECTIVE)
    roles = combined(_programs(table, ranks), parts)
    if not roles.any():
        return dict.fromkeys(ranks, EVERYBODY)
    first: dict[int, int] = {}
    for rank, role in zip(ranks, roles, strict=True):
        first.setdefault(int(role), rank)
    return {rank: f"like rank {first[int(role)]}" for rank, role in zip(ranks, roles, strict=True)}


def _programs(table: Operations, ranks: list[int]) -> Array:
    """A number for each rank, equal for ranks that do operations of the same names."""
    does = np.zeros((len(ranks), max(len(table.ops), 1)), dtype=bool)
    does[np.searchsorted(ranks, table.rank), table.op] = True
    _, programs = np.unique(does, axis=0, return_inverse=True)
    numbers: Array = programs.reshape(-1)
    return numbers


def _joined(table: Operations, ranks: Array, collective: Array) -> Array:
    """A number for each rank, equal for ranks that groups smaller than all ranks connect.

    Every rank gets the same number where groups connect nobody.
    """
    at = np.flatnonzero(collective & (table.group >= 0))
    pairs = np.unique(np.c_[table.group[at], np.searchsorted(ranks, table.rank[at])], axis=0)
    sizes = np.bincount(pairs[:, 0], minlength=len(table.groups) + 1)
    pairs = pairs[(sizes[pairs[:, 0]] > 1) & (sizes[pairs[:, 0]] < len(ranks))]
    parts = np.arange(len(ranks))
    if not len(pairs):
        return np.zeros(len(ranks), dtype=np.int64)
    while True:
        lowest = np.full(len(sizes), len(ranks))
        np.minimum.at(lowest, pairs[:, 0], parts[pairs[:, 1]])
        before = parts.copy()
        np.minimum.at(parts, pairs[:, 1], lowest[pairs[:, 0]])
        if (parts == before).all():
            return dense(parts)[1]
