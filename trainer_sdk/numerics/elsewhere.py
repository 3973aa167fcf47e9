"""Another rank, on another node where there is one, computes the same step and compares."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from everstep.hashing import hash_of
from trainer_sdk.numerics.agreement import RankAgreement, RankPlace
from trainer_sdk.numerics.judgement import StepResult
from trainer_sdk.numerics.replay import NO_BATCH, StepCall, recorded_run
from trainer_sdk.numerics.replica_hash import bits_sum
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts, local
from trainer_sdk.sdk_log import warn_once


class StepPeers:
    """The ranks that compute the steps of each other: each rank computes another one's."""

    def __init__(self, places: Sequence[RankPlace], rank: int) -> None:
        self.places = places
        self._rank = rank
        self.shift = _shift(places)

    @property
    def computer(self) -> int:
        """The rank that computes this rank's step."""
        return _peer(self.places, self._rank, self.shift)

    @property
    def source(self) -> int:
        """The rank whose step this one computes."""
        return _peer(self.places, self._rank, -self.shift)

    def replica(self, rank: int) -> int | None:
        """What is equal on the ranks that compute a replica together, as stages of a pipeline."""
        peers = self.places[rank].peers
        if len(peers) in (0, len(self.places)):
            return None
        return peers.index(rank)


def computed_elsewhere(
    parts: TrainingParts,
    calls: Sequence[StepCall],
    before: Snapshot,
    agreement: RankAgreement,
    peers: StepPeers,
) -> StepResult | None:
    """The result of the step of `peers.source`, computed here; None if that is not possible.

    All ranks call it together, and each computes for another one; the collectives of the function
    then join the same parts of the model as before.
    """
    sent = _encoded(calls, before)
    octets = agreement.swap(sent, peers.computer, peers.source)
    if octets is None:
        warn_once(
            "numerics: another rank cannot compute this step: give compute(function, batch), with "
            "a batch of tensors, numbers and texts"
        )
        return None
    inputs, buffers = _decoded(octets, type(calls[0].batch))
    before.put_back_tensors()
    with torch.no_grad():
        for (_, _, tensor, copy, _), other in zip(before.buffers, buffers, strict=True):
            if other is not None and copy.shape == other.shape:
                tensor.copy_(other)
    return recorded_run(parts, calls, inputs)


def inputs_hash(
    parts: TrainingParts, calls: Sequence[StepCall], before: Snapshot, data: object
) -> str:
    """A hash of all that a step's result depends on; empty if that is not known.

    `data` is the position of its data, or None.
    """
    values: list[Any] = [data]
    for call in calls:
        batch = call.batch
        given = pytree.tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
        if data is None and not all(isinstance(leaf, _SENT) for leaf in given):
            return ""
        states = _packed(call.before)
        values += [leaf for leaf in (*given, *states.values()) if isinstance(leaf, _SENT)]
        values += [states["python"], states.get("numpy")]
    buffers = (copy for *_, copy, _ in before.buffers)
    values += [*parts.parameters(), *buffers]
    hashed = [
        (tuple(value.shape), int(bits_sum(local(value)))) if isinstance(value, Tensor) else value
        for value in values
    ]
    return hash_of(repr(hashed).encode())


def _encoded(calls: Sequence[StepCall], before: Snapshot) -> bytes:
    """Batches, random states and small buffers; empty if the batches cannot be sent."""
    if any(call.batch is NO_BATCH for call in calls):
        return b""
    buffers = [copy if copy.numel() <= _SENT_MOST else None for *_, copy, _ in before.buffers]
    inputs = []
    for call in calls:
        batch = dict(call.batch) if isinstance(call.batch, Mapping) else call.batch
        leaves, spec = pytree.tree_flatten(batch)
        if not all(isinstance(leaf, _SENT) for leaf in leaves):
            return b""
        try:
            kind = pytree.treespec_dumps(spec)
        except (NotImplementedError, TypeError, ValueError):  # as of a class of the user's
            return b""
        inputs.append((leaves, kind, _packed(call.before)))
    octets = io.BytesIO()
    torch.save((inputs, buffers), octets)
    return octets.getvalue()


def _decoded(
    octets: bytes, kind: type[Any]
) -> tuple[list[tuple[Any, RandomStates]], list[Tensor | None]]:
    """The same; a mapping is of the class that this rank's own batch has."""
    sent, buffers = torch.load(io.BytesIO(octets), map_location=_own_device, weights_only=True)
    inputs = []
    for leaves, spec, states in sent:
        batch = pytree.tree_unflatten(leaves, pytree.treespec_loads(spec))
        if isinstance(batch, dict) and kind is not dict:
            batch = kind(batch)
        inputs.append((batch, _unpacked(states)))
    return inputs, buffers


def _packed(states: RandomStates) -> dict[str, Any]:
    packed: dict[str, Any] = {"python": states.python, "torch": states.torch, "cuda": states.cuda}
    if states.numpy is not None:
        name, keys, *rest = states.numpy
        packed["numpy"] = (name, keys.tolist(), *rest)
    return packed


def _unpacked(packed: dict[str, Any]) -> RandomStates:
    states = RandomStates()
    states.python, states.torch = packed["python"], packed["torch"].cpu()
    states.cuda = None if packed["cuda"] is None else packed["cuda"].cpu()
    states.numpy = packed.get("numpy")
    return states


def _own_device(storage: Any, place: str) -> Any:
    return storage.cuda() if place.startswith("cuda") else storage


def _shift(places: Sequence[RankPlace]) -> int:
    """How far the computing rank is in the list of peers; 0 if there are no peers."""
    sizes = {len(place.peers) for place in places}
    if len(sizes) != 1 or min(sizes) < 2:
        return 0
    size = sizes.pop()

    def on_other_nodes(shift: int) -> int:
        return sum(
            place.node != places[_peer(places, rank, shift)].node
            for rank, place in enumerate(places)
        )

    return max(range(1, size), key=lambda shift: (on_other_nodes(shift), -shift))


def _peer(places: Sequence[RankPlace], rank: int, shift: int) -> int:
    peers = places[rank].peers
    return peers[(peers.index(rank) + shift) % len(peers)]


_SENT = (Tensor, int, float, str, bytes, bool, type(None))
_SENT_MOST = 1 << 16
