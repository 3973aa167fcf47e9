"""The ranks of a new round agree on a state, and those that lack it get it. All call it together.

A rank copies from a replica: from the memory of its process on the same node, else through the
training's own process group. Where no replica lives, all ranks restore an image.
"""

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.environment import environ
from trainer_sdk.sdk_log import warn
from trainer_sdk.survive.agreement import (
    CopyResult,
    HealPlan,
    Origin,
    RankHolding,
    after_failures,
    agree,
    failed_copies,
    needs_images,
    unequal_replicas,
)
from trainer_sdk.survive.peer_memory import MemoryToken, readable_memory
from trainer_sdk.survive.place import place_of
from trainer_sdk.survive.state_copy import Content, Receiver, Skeleton, State

_FROM_MEMORY: Final = "memory"
_THROUGH_GROUP: Final = "group"
_PARCEL = 1 << 20
"""Smaller tensors travel together."""
_IN_FLIGHT = 2


class Images(Protocol):
    """Saved states; all ranks call it together. A `Checkpointer` is one."""

    def restore(self, state: Any, /) -> Any: ...


class ReplicasDifferError(RuntimeError):
    """Ranks that should hold the same do not, and there is no image to go back to."""


@dataclass(frozen=True, slots=True)
class Healed:
    """The state with which this rank goes on, and where all ranks have theirs."""

    origin: Origin
    step: int | None
    """None for a new beginning."""
    made_in: int
    """The round in which that step was made or loaded."""
    took_s: float
    reason: str
    donor: int | None = None
    size_bytes: int = 0
    """What this rank has received from the donor."""
    kept: int = 0
    """How many ranks go on with their own state."""
    taken: int = 0
    """How many processes had a state before, and have got another."""
    replaced: tuple[int, ...] = ()
    """The ranks whose processes are new."""
    places: frozenset[str] = frozenset()
    """The parts of the state that these ranks have."""
    is_replicated: bool = False
    """Each part is on two nodes or more."""
    is_first: bool = False
    """No rank has had a state: the job begins."""


def heal(  # noqa: PLR0913 - what a rank knows of itself
    state: State,
    *,
    step: int | None,
    is_torn: bool,
    made_in: int,
    round: int,
    place: str = "",
    images: Images | None = None,
    begin_change: Callable[[], None] = lambda: None,
) -> Healed:
    """Agree with all ranks of the default group on a state, and have it in `state`.

    `step` is the last step in this rank's state, and None in a new process; `is_torn` if a part of
    it is of another. `begin_change` is called before the state is changed: from then on it is torn
    until this returns. `images` belongs to the present group. A broken group raises.
    """
    ranks = group_of_all()
    own = RankHolding(
        rank=ranks.rank,
        place=place_of(state, place),
        step=step,
        is_torn=is_torn,
        node=_node(),
        made_in=made_in,
    )
    with torch.inference_mode(mode=False), torch.no_grad():
        return _Healing(state, ranks, round, images, begin_change).run(own)


class _Healing:
    """A rank's part in the healing of a round."""

    def __init__(
        self,
        state: State,
        ranks: RankGroup,
        round_: int,
        images: Images | None,
        begin_change: Callable[[], None],
    ) -> None:
        self._began = monotonic()
        self._state = state
        self._ranks = ranks
        self._round = round_
        self._images = images
        self._begin_change = begin_change
        self._donor: int | None = None
        self._size_bytes = 0

    def run(self, own: RankHolding) -> Healed:
        holdings = first = self._ranks.gather(own, RankHolding)
        kept: int | None = None
        while True:
            if needs_images(holdings) and (healed := self._from_image(first)) is not None:
                return healed
            plan = agree(holdings)
            if not plan.is_live:
                return self._healed(first, "fresh", None, self._round, plan.reason)
            own_sources = sum(source == "own" for source in plan.sources.values())
            kept = own_sources if kept is None else min(kept, own_sources)
            failed = self._copy(plan)
            if failed is None:
                return self._from_image(first) or self._refuse(plan)
            if not failed:
                return self._live(first, plan, kept)
            holdings = after_failures(holdings, plan, failed)

    def _live(self, first: Sequence[RankHolding], plan: HealPlan, kept: int) -> Healed:
        origin: Origin = "own" if self._donor is None else "rank"
        return self._healed(first, origin, plan.step, plan.made_in, plan.reason, kept)

    def _healed(
        self,
        first: Sequence[RankHolding],
        origin: Origin,
        step: int | None,
        made_in: int,
        reason: str,
        kept: int = 0,
    ) -> Healed:
        replaced = tuple(holding.rank for holding in first if holding.step is None)
        return Healed(
            origin=origin,
            step=step,
            made_in=made_in,
            took_s=monotonic() - self._began,
            reason=reason,
            donor=self._donor if origin == "rank" else None,
            size_bytes=self._size_bytes if origin == "rank" else 0,
            kept=kept,
            taken=len(first) - kept - len(replaced),
            replaced=replaced,
            places=frozenset(holding.place for holding in first),
            is_replicated=_is_replicated(first),
            is_first=len(replaced) == len(first),
        )

    def _from_image(self, first: Sequence[RankHolding]) -> Healed | None:
        """The newest image that all ranks can load; None if there is none."""
        if self._images is None:
            return None
        try:
            restored = self._images.restore(self._state)
        except BaseException:
            self._begin_change()
            raise
        if restored is None:
            return None
        self._begin_change()
        reason = f"step {restored.step} is the newest image that all ranks can load"
        return self._healed(first, "image", restored.step, self._round, reason)

    def _refuse(self, plan: HealPlan) -> Healed:
        pairs = ", ".join(f"{donor} and {other}" for donor, other in plan.witnesses.items())
        raise ReplicasDifferError(
            f"of ranks {pairs} some hold other parameters or states of optimizers at step "
            f"{plan.step}, and should hold the same: give run.survive(…, place=…) the name of the "
            "part of the state that a rank has, another for ranks that are not replicas"
        )

    def _copy(self, plan: HealPlan) -> dict[int, str] | None:
        """The ranks whose copies failed, each with the reason; None if replicas differ."""
        copies = plan.copies
        if not copies:
            return {}
        rank = self._ranks.rank
        source = plan.sources[rank]
        with ExitStack() as stack:
            if rank in copies:
                stack.enter_context(readable_memory())
                content = self._content()
                self._give(content, copies[rank])
                result = content.result()
            elif isinstance(source, int):
                result = self._take(source)
            elif rank in plan.witnesses.values():
                result = self._content().result()
            else:
                result = CopyResult()
            results = self._ranks.gather(result, CopyResult)  # until then the donor stands still
        if unequal_replicas(plan, results):
            return None
        failed = failed_copies(plan, results)
        if rank in failed:
            self._donor = None
            warn(f"copied no state from rank {source}: {failed[rank]}", rank)
        return failed

    def _content(self) -> Content:
        try:
            return Content.of(self._state)
        except Exception as error:  # noqa: BLE001 - those who wait for it must know
            return Content.failed(error)

    def _give(self, content: Content, receivers: Sequence[int]) -> None:
        for receiver in receivers:
            self._ranks.send(content.skeleton, receiver)
        ways = {receiver: self._ranks.receive(str, receiver) for receiver in receivers}
        for receiver, way in ways.items():
            if way == _THROUGH_GROUP:
                self._send_tensors(content.tensors, receiver)

    def _take(self, donor: int) -> CopyResult:
        skeleton = self._ranks.receive(Skeleton, donor)
        receiver, error = None, skeleton.error
        if not error:
            self._begin_change()
            try:
                receiver = Receiver(self._state, skeleton)
            except Exception as failure:  # noqa: BLE001 - the donor waits for an answer
                error = f"{type(failure).__name__}: {failure}"
        if receiver is None:
            self._ranks.send("", donor)
            return CopyResult(error=error)
        way = _FROM_MEMORY if _is_readable(skeleton) else _THROUGH_GROUP
        self._ranks.send(way, donor)
        if way == _THROUGH_GROUP:
            self._receive_tensors(receiver, donor)
        try:
            if way == _FROM_MEMORY:
                receiver.read()
            self._donor, self._size_bytes = donor, receiver.size_bytes
            return receiver.finish()
        except Exception as failure:  # noqa: BLE001 - all ranks must know
            return CopyResult(error=f"{type(failure).__name__}: {failure}")

    def _send_tensors(self, tensors: Sequence[Tensor], receiver: int) -> None:
        begun: deque[Any] = deque()
        for parcel in _parcels(tensors):
            octets = [_octets(tensors[index]) for index in parcel]
            joined = octets[0] if len(octets) == 1 else torch.cat(octets)
            begun.append((self._ranks.send_tensor(joined, receiver), joined))
            if len(begun) > _IN_FLIGHT:
                begun.popleft()[0].wait()
        for work, _ in begun:
            work.wait()

    def _receive_tensors(self, receiver: Receiver, donor: int) -> None:
        places = receiver.places
        for parcel in _parcels(places):
            octets = [_octets(places[index]) for index in parcel]
            is_direct = len(octets) == 1
            size = sum(map(len, octets))
            joined = octets[0] if is_direct else torch.empty(size, dtype=torch.uint8, device="cpu")
            self._ranks.receive_tensor(joined, donor)
            pieces = torch.split(joined, [*map(len, octets)])
            for index, own, arrived in zip(parcel, octets, pieces, strict=True):
                if not is_direct:
                    own.copy_(arrived)
                receiver.arrived(index)


def _is_replicated(holdings: Sequence[RankHolding]) -> bool:
    """Whether each part of the state is on two nodes or more, by the numbers of ranks."""
    ranks_per_node = int(environ.get("LOCAL_WORLD_SIZE") or len(holdings))
    nodes: dict[str, set[int]] = defaultdict(set)
    for holding in holdings:
        nodes[holding.place].add(holding.rank // ranks_per_node)
    return all(len(those) > 1 for those in nodes.values())


def _is_readable(skeleton: Skeleton) -> bool:
    """Whether this process can read the donor's memory."""
    return MemoryToken.is_at(skeleton.pid, skeleton.token_address, skeleton.token)


def _parcels(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors that travel together, the same on both sides."""
    parcel: list[int] = []
    size = 0
    for index, tensor in enumerate(tensors):
        if parcel and size + tensor.nbytes > _PARCEL:
            yield parcel
            parcel, size = [], 0
        parcel.append(index)
        size += tensor.nbytes
    if parcel:
        yield parcel


def _octets(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8)


def _node() -> str:
    """The same in processes that may read each other's memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
