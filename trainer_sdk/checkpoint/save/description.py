"""What ranks tell each other of their states before a save, and which rank writes what."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.flat_state import FlatState, LocalForm, StatePiece, is_bare, read_form
from trainer_sdk.checkpoint.restore.values import UnreadableValueError


class PlanError(Exception):
    """The state of a rank cannot be saved at all."""


class Description(msgspec.Struct, frozen=True):
    """The description that a rank sends to the others."""

    pieces: tuple[StatePiece, ...]
    mark: str
    error: str = ""
    buffers: tuple[str, ...] = ()
    """The keys of buffers of modules."""
    numbering: dict[str, str] = {}
    """As of `numbering_of`."""


def form_of(flat: FlatState) -> tuple[LocalForm, str]:
    """The form of a state, and its error, if any: the other ranks wait for the answer."""
    try:
        for key in flat.values:
            if not key.isascii():
                key.encode()
        return read_form(flat), ""
    except UnicodeEncodeError as error:
        return LocalForm((), (), ()), f"the key {error.object!a} cannot be written as UTF-8"
    except UnreadableValueError as error:
        return LocalForm((), (), ()), str(error)
    except Exception as error:  # noqa: BLE001 - a class of the user may raise anything
        return LocalForm((), (), ()), f"{type(error).__name__}: {error}"


def buffers_in(state: Mapping[str, Any], flat: FlatState) -> tuple[str, ...]:
    """The keys of the buffers of all modules in the state, also of those that an object wraps."""
    places = {
        buffer.data_ptr()
        for part in state.values()
        for module in (part, *getattr(part, "__dict__", {}).values())
        if isinstance(module, torch.nn.Module)
        for buffer in module.buffers()
        if type(buffer) is torch.Tensor and buffer.numel()
    }
    return tuple(
        key
        for key, value in flat.values.items()
        if type(value) is torch.Tensor and is_bare(value) and value.data_ptr() in places
    )


def numbering_of(state: Mapping[str, Any]) -> dict[str, str]:
    """For each optimizer, the hash of the names of its parameters, in their order.

    The keys of an optimizer's state have the number of a parameter, and not its name.
    """
    names = {
        id(parameter): f"{name}.{own}"
        for name, part in state.items()
        if isinstance(part, torch.nn.Module)
        for own, parameter in part.named_parameters()
    }
    numbered = {
        name: [
            names.get(id(parameter), "")
            for group in part.param_groups
            for parameter in group["params"]
        ]
        for name, part in state.items()
        if isinstance(part, torch.optim.Optimizer)
    }
    return {name: hash_of(msgspec.json.encode(own)) for name, own in numbered.items()}


def check_names(told: Sequence[Description]) -> None:
    """`PlanError` if ranks have different things under one name: files would keep one of them."""
    forms: dict[str, tuple[int, str]] = {}
    for rank, description in enumerate(told):
        for piece in description.pieces:
            form = f"{piece.dtype}{list(piece.shape)}" if piece.dtype else "no tensor"
            other, saved = forms.setdefault(piece.key, (rank, form))
            if form != saved:
                raise PlanError(
                    f"{piece.key} is {form} on rank {rank}, and {saved} on rank {other}: give it "
                    "another name in the state of each of them"
                )
    _check_numbering(told)


def _check_numbering(told: Sequence[Description]) -> None:
    first: dict[str, int] = {}
    for rank, description in enumerate(told):
        for name, numbering in description.numbering.items():
            other = first.setdefault(name, rank)
            if told[other].numbering[name] != numbering:
                raise PlanError(
                    f"{name} has other parameters on rank {rank} than on rank {other}, under the "
                    "same numbers: give it another name in the state of each of them, as "
                    '"optimizer-0" and "optimizer-1" for stages, or give its state by the names '
                    "of parameters, with torch's get_optimizer_state_dict"
                )


def shared_pieces(told: Sequence[Description], rank: int) -> tuple[tuple[int, ...], ...]:
    """The numbers of this rank's pieces that may be scalars and that other ranks have as well.

    They are grouped by the ranks that have them; all ranks have the groups in the same order.
    """
    ranks: dict[MetadataIndex, list[int]] = {}
    for number, description in enumerate(told):
        for piece in description.pieces:
            if not piece.shape and not piece.is_shard:
                ranks.setdefault(index_of(piece), []).append(number)
    groups = {tuple(having): list[int]() for having in ranks.values() if len(having) > 1}
    for number, piece in enumerate(told[rank].pieces):
        own = groups.get(tuple(ranks.get(index_of(piece), ())))
        if own is not None:
            own.append(number)
    return tuple(tuple(groups[having]) for having in sorted(groups))


def offered(told: Sequence[Description]) -> list[SavePlan]:
    """The pieces of each rank; a buffer or a value that several ranks have, of one rank only.

    Torch balances how much ranks write, so it would take it from any rank. But the ranks of
    `DistributedDataParallel` use the buffers of the lowest rank, and a rank without rows of a
    parameter may have no true state of it.
    """
    claims: dict[MetadataIndex, tuple[bool, int]] = {}
    for rank, description in enumerate(told):
        rows: Counter[str] = Counter()
        buffers, own = set(description.buffers), []
        for piece in description.pieces:
            if piece.is_shard:
                rows[_parent(piece)] += math.prod(piece.sizes)
            elif not piece.shape or piece.key in buffers:
                own.append(piece)
        for piece in own:
            claim = rows.get(_parent(piece)) == 0, rank
            claims[index_of(piece)] = min(claims.get(index_of(piece), claim), claim)
    return [
        _as_torch([p for p in each.pieces if claims.get(index_of(p), (False, rank))[1] == rank])
        for rank, each in enumerate(told)
    ]


def _parent(piece: StatePiece) -> str:
    return piece.key.rpartition(".")[0]


def _as_torch(pieces: Sequence[StatePiece]) -> SavePlan:
    return SavePlan(
        [_write_item(piece) for piece in pieces],
        planner_data={piece.key: piece.path for piece in pieces},
    )


def _write_item(piece: StatePiece) -> WriteItem:
    if not piece.dtype:
        return WriteItem(MetadataIndex(piece.key), WriteItemType.BYTE_IO)
    return WriteItem(
        index=MetadataIndex(piece.key, piece.offsets),
        type=WriteItemType.SHARD if piece.is_shard else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)),
            properties=TensorProperties(
                dtype=getattr(torch, piece.dtype), requires_grad=piece.requires_grad
            ),
            size=torch.Size(piece.shape),
        ),
    )


def index_of(piece: StatePiece) -> MetadataIndex:
    return MetadataIndex(piece.key, piece.offsets if piece.dtype else None)
