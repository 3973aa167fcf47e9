"""Which ranks take part in an iteration, and under which numbers.

`Tree` assigns by places within places, as racks and hosts; the others by numbers only.
"""

import abc
import dataclasses
import datetime
import enum
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from trainer_sdk.nvrx.inprocess.iteration_store import IterationStore
from trainer_sdk.nvrx.inprocess.state import Mode, RestartError, State

_WITHIN = datetime.timedelta(seconds=60)
_Place = tuple[str, ...]


class RankDiscarded(RestartError):  # noqa: N818 - NVRx's name
    """The rank takes part in no further iteration."""


@dataclasses.dataclass
class RankAssignmentCtx:
    """What an assignment reads and changes."""

    state: State
    store: IterationStore
    terminated_ranks: set[int]


class RankAssignment(abc.ABC):
    """Gives the ranks that are left their numbers."""

    @abc.abstractmethod
    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Change the context; returns it."""


class RankFilter(RankAssignment):
    """Chooses which ranks call the function; the others wait as a reserve."""


class ActivateAllRanks(RankFilter):
    """All ranks call the function."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate this rank."""
        _activate_below(ctx, ctx.state.world_size)
        return ctx


class MaxActiveWorldSize(RankFilter):
    """At most this number of ranks call the function: those with the lowest numbers."""

    def __init__(self, max_active_world_size: int | None = None) -> None:
        self.max_active_world_size = max_active_world_size

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate or deactivate this rank."""
        active = _active(ctx.state)
        if self.max_active_world_size is not None:
            active = min(active, self.max_active_world_size)
        _activate_below(ctx, active)
        return ctx


class ActiveWorldSizeDivisibleBy(RankFilter):
    """The number of ranks that call the function is a multiple of `divisor`."""

    def __init__(self, divisor: int = 1) -> None:
        self.divisor = divisor

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Activate or deactivate this rank."""
        _activate_below(ctx, _active(ctx.state) // self.divisor * self.divisor)
        return ctx


class ShiftRanks(RankAssignment):
    """Ranks keep their order: each moves down by the number of lost ranks before it."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Give this rank its number."""
        rank = _kept(ctx)
        _renumber(ctx, rank - sum(lost < rank for lost in ctx.terminated_ranks))
        return ctx


class FillGaps(RankAssignment):
    """Ranks with the highest numbers take the numbers of lost ranks; the others keep theirs."""

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Give this rank its number."""
        rank = _kept(ctx)
        left = ctx.state.world_size - len(ctx.terminated_ranks)
        if rank >= left:
            gaps = sorted(lost for lost in ctx.terminated_ranks if lost < left)
            movers = [
                mover
                for mover in range(left, ctx.state.world_size)
                if mover not in ctx.terminated_ranks
            ]
            rank = gaps[movers.index(rank)]
        _renumber(ctx, rank)
        return ctx


class FilterCountGroupedByKey(RankAssignment):
    """Excludes all ranks of a group, as those of a host, unless `condition(count)` holds.

    Compose it with an assignment that follows it, and gives the ranks that are left their numbers.
    """

    instance_count = 0

    def __init__(
        self,
        key_or_fn: "str | Callable[[State], str]",
        condition: Callable[[int], bool],
        timeout: datetime.timedelta = _WITHIN,
    ) -> None:
        self.key_or_fn = key_or_fn
        self.condition = condition
        self.timeout = timeout
        self.name = f"groups-{type(self).instance_count}"
        type(self).instance_count += 1

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Mark the ranks of groups that are too small."""
        rank, shared = ctx.state.rank, ctx.store
        if rank is None or rank in ctx.terminated_ranks:
            return ctx
        within_s = self.timeout.total_seconds()
        left = ctx.state.world_size - len(ctx.terminated_ranks)
        key = self.key_or_fn(ctx.state) if callable(self.key_or_fn) else self.key_or_fn
        shared.count(f"{self.name}/count/{key}")
        shared.arrive(f"{self.name}/counted", rank)
        shared.wait(f"{self.name}/counted", within_s, left)
        if not self.condition(shared.counted(f"{self.name}/count/{key}")):
            number = shared.count(f"{self.name}/n")
            shared.put(f"{self.name}/marked/{number}", str(rank))
        shared.arrive(f"{self.name}/judged", rank)
        shared.wait(f"{self.name}/judged", within_s, left)
        count = shared.counted(f"{self.name}/n")
        marked = shared.take(f"{self.name}/marked/{each}" for each in range(1, count + 1))
        ctx.terminated_ranks = ctx.terminated_ranks | {int(each) for each in marked}
        return ctx


class LayerFlag(enum.Flag):
    """What may happen inside a place of a layer."""

    RESERVE = enum.auto()
    """A waiting rank of the place replaces a lost one."""
    BACKFILL = enum.auto()
    """The active rank with the highest number in the place takes the number of a lost one."""


@dataclasses.dataclass
class Layer:
    """A level of places, such as hosts; ranks with the same key are in the same place."""

    min_ranks: int = 1
    """A place with fewer ranks is excluded as a whole."""
    max_ranks: int | None = None
    """At most this number of its ranks call the function."""
    key_or_fn: "str | Callable[[State], str]" = ""
    flag: LayerFlag | None = None

    def allows(self, flag: LayerFlag) -> bool:
        """Whether the layer has this flag."""
        return self.flag is not None and bool(self.flag & flag)


@dataclasses.dataclass
class _Leaf:
    """A rank, and where it is."""

    initial_rank: int
    place: _Place
    rank: int | None
    mode: Mode = Mode.INACTIVE
    active_rank: int | None = None

    @property
    def is_left(self) -> bool:
        return self.mode is not Mode.TERMINATED


class Tree(RankAssignment):
    """Assigns ranks by layers of places, the outermost first; it is not composed with others."""

    def __init__(
        self, layers: Sequence[Layer], world_size_filter: Callable[[int], int] | None = None
    ) -> None:
        if not layers:
            raise ValueError("Tree needs at least one Layer")
        self.layers = list(layers)
        self.world_size_filter = world_size_filter
        self._leaves: list[_Leaf] = []
        self._by_place: dict[_Place, list[_Leaf]] = {}
        self._active = 0

    def __call__(self, ctx: RankAssignmentCtx) -> RankAssignmentCtx:
        """Assign all ranks, in the same way on each of them."""
        if not self._leaves:
            self._build(ctx)
            self._activate()
        lost = self._lost(ctx.terminated_ranks)
        waiting = [leaf for leaf in lost if leaf.mode is Mode.ACTIVE]
        for leaf in lost:
            leaf.mode = Mode.TERMINATED
        reserves: dict[_Place, list[_Leaf]] = {}
        unreplaced = [leaf for leaf in waiting if not self._replace(leaf, reserves)]
        self._shift(self._backfill(unreplaced))
        self._active -= len(unreplaced)
        self._filter()
        for rank, leaf in enumerate(self._left()):
            leaf.rank = rank
        ctx.terminated_ranks = set()
        ctx.state = self._state(ctx.state)
        return ctx

    def _build(self, ctx: RankAssignmentCtx) -> None:
        """Exchange the places of all ranks."""
        state, shared = ctx.state, ctx.store
        own = [
            layer.key_or_fn(state) if callable(layer.key_or_fn) else layer.key_or_fn
            for layer in self.layers
        ]
        shared.put(f"place/{state.rank}", json.dumps([state.initial_rank, own]))
        texts = shared.take(f"place/{rank}" for rank in range(state.world_size))
        leaves = [
            _Leaf(initial, tuple(place), rank)
            for rank, (initial, place) in enumerate(map(json.loads, texts))
        ]
        roots = sorted({leaf.place[0] for leaf in leaves})
        if len(roots) != 1:
            raise RuntimeError(
                f"all ranks must have the same key at the first layer, and they have {roots}"
            )
        self._leaves = list(_ordered(leaves, 0, len(self.layers)))
        for leaf in self._leaves:
            for place in self._places(leaf):
                self._by_place.setdefault(place, []).append(leaf)

    def _activate(self) -> None:
        """Activate ranks, as far as the layers allow."""
        counts: Counter[_Place] = Counter()
        for leaf in self._leaves:
            places = self._places(leaf)
            if all(
                layer.max_ranks is None or counts[place] < layer.max_ranks
                for layer, place in zip(self.layers, places, strict=True)
            ):
                leaf.mode, leaf.active_rank = Mode.ACTIVE, self._active
                self._active += 1
                counts.update(places)

    def _lost(self, ranks: set[int]) -> list[_Leaf]:
        """Lost ranks, and those of places that have become too small; in the order of ranks."""
        lost = {leaf.initial_rank for leaf in self._left() if leaf.rank in ranks}
        for depth in reversed(range(len(self.layers))):
            members: dict[_Place, list[_Leaf]] = {}
            for leaf in self._left():
                members.setdefault(leaf.place[: depth + 1], []).append(leaf)
            for leaves in members.values():
                left = [leaf for leaf in leaves if leaf.initial_rank not in lost]
                if len(left) < self.layers[depth].min_ranks:
                    lost.update(leaf.initial_rank for leaf in leaves)
        return sorted(
            (leaf for leaf in self._left() if leaf.initial_rank in lost),
            key=lambda leaf: leaf.rank or 0,
        )

    def _replace(self, lost: _Leaf, reserves: dict[_Place, list[_Leaf]]) -> bool:
        """Have a waiting rank take the number of a lost one, from the nearest place.

        `reserves` has the waiting ranks of each place; those that another place has used stay in.
        """
        for place in self._places_with(lost, LayerFlag.RESERVE):
            if place not in reserves:
                reserves[place] = self._in(place, Mode.INACTIVE)
            while reserves[place]:
                reserve = reserves[place].pop()
                if reserve.mode is Mode.INACTIVE:
                    reserve.mode, reserve.active_rank = Mode.ACTIVE, lost.active_rank
                    return True
        return False

    def _backfill(self, lost: list[_Leaf]) -> list[int]:
        """Have active ranks take lost numbers in their place; returns numbers that are free."""
        free: list[int] = []
        by_place: dict[_Place, list[_Leaf]] = {}
        for leaf in lost:
            places = self._places_with(leaf, LayerFlag.BACKFILL)
            if places:
                by_place.setdefault(places[-1], []).append(leaf)
            else:
                free.append(_number(leaf))
        for place, leaves in by_place.items():
            movers = sorted(self._in(place, Mode.ACTIVE), key=_number)[-len(leaves) :]
            for position, leaf in enumerate(sorted(leaves, key=_number)):
                mover = movers[position] if position < len(movers) else None
                gap = _number(leaf)
                if mover is not None and _number(mover) > gap:
                    gap, mover.active_rank = _number(mover), gap
                free.append(gap)
        return free

    def _shift(self, free: list[int]) -> None:
        gaps = sorted(free)
        for leaf in self._left():
            if leaf.active_rank is not None:
                leaf.active_rank -= bisect_left(gaps, leaf.active_rank)

    def _filter(self) -> None:
        if self.world_size_filter is None:
            return
        wanted = self.world_size_filter(self._active)
        if wanted > self._active:
            raise ValueError(
                f"world_size_filter({self._active}) returned {wanted}: it can only lower the number"
            )
        self._active = wanted
        for leaf in self._left():
            if leaf.active_rank is not None and leaf.active_rank >= wanted:
                leaf.mode, leaf.active_rank = Mode.INACTIVE, None

    def _state(self, state: State) -> State:
        own = next(leaf for leaf in self._leaves if leaf.initial_rank == state.initial_rank)
        if not own.is_left:
            raise RankDiscarded(f"rank {state.rank} is excluded by the layers of its place")
        return dataclasses.replace(
            state,
            rank=own.rank,
            world_size=len(list(self._left())),
            active_rank=own.active_rank,
            active_world_size=self._active,
            mode=own.mode,
        )

    def _left(self) -> Iterable[_Leaf]:
        return [leaf for leaf in self._leaves if leaf.is_left]

    def _in(self, place: _Place, mode: Mode) -> list[_Leaf]:
        return [leaf for leaf in self._by_place[place] if leaf.mode is mode]

    def _places(self, leaf: _Leaf) -> list[_Place]:
        return [leaf.place[: depth + 1] for depth in range(len(self.layers))]

    def _places_with(self, leaf: _Leaf, flag: LayerFlag) -> list[_Place]:
        """The places of a rank from the innermost outwards, as far as the layers have the flag."""
        places: list[_Place] = []
        for layer, place in reversed(list(zip(self.layers, self._places(leaf), strict=True))):
            if not layer.allows(flag):
                break
            places.append(place)
        return places


def _kept(ctx: RankAssignmentCtx) -> int:
    """The rank's number; `RankDiscarded` if it is excluded."""
    rank = ctx.state.rank
    if rank is None or rank in ctx.terminated_ranks:
        raise RankDiscarded(f"rank {rank} is excluded, with {sorted(ctx.terminated_ranks)}")
    return rank


def _renumber(ctx: RankAssignmentCtx, rank: int) -> None:
    left = ctx.state.world_size - len(ctx.terminated_ranks)
    ctx.state = dataclasses.replace(ctx.state, rank=rank, world_size=left)
    ctx.terminated_ranks = set()


def _active(state: State) -> int:
    """How many ranks may be active by the filters before."""
    return min(state.active_world_size or state.world_size, state.world_size)


def _activate_below(ctx: RankAssignmentCtx, active: int) -> None:
    rank = ctx.state.rank
    is_active = rank is not None and rank < active
    ctx.state = dataclasses.replace(
        ctx.state,
        mode=Mode.ACTIVE if is_active else Mode.INACTIVE,
        active_rank=rank if is_active else None,
        active_world_size=active,
    )


def _ordered(leaves: Sequence[_Leaf], depth: int, depths: int) -> Iterable[_Leaf]:
    """Ranks of the same place next to each other; places in the order in which they occur."""
    if depth == depths:
        yield from leaves
        return
    members: dict[str, list[_Leaf]] = {}
    for leaf in leaves:
        members.setdefault(leaf.place[depth], []).append(leaf)
    for each in members.values():
        yield from _ordered(each, depth + 1, depths)


def _number(leaf: _Leaf) -> int:
    assert leaf.active_rank is not None, "only active ranks have a number"
    return leaf.active_rank
