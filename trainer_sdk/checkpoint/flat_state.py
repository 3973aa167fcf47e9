"""The state of a rank, flattened: tensors that are copied as they are, and values as bytes."""

import re
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from trainer_sdk.checkpoint.restore.values import as_bytes, is_strided, unsavable

Numbers = tuple[int, ...]
_COMPILED = re.compile(r"(?<![^.])_orig_mod\.")
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, int, float, str, bool, type(None)})
_DICTS = frozenset({dict, OrderedDict, defaultdict})
_ALIGNED = 64
# Torch searches the end of a value backwards from the end of its space, in blocks of 4 KiB and up
# to 64 KiB; in its second block it must not reach the beginning.
_MOST_SLACK = 32 << 10
_MOST_SLACK_OF_SMALL = 4000
_SMALL = 8192
_SPARE = 16 << 10


class StatePiece(msgspec.Struct, frozen=True, array_like=True):
    """A tensor, a shard of a tensor, or another value, as ranks describe it to each other."""

    key: str
    path: tuple[str | int, ...]
    length: int
    """Of its data, or of the space that is reserved for it."""
    is_bare: bool
    """Whether its data are the tensor's own bytes; otherwise the output of `torch.save`."""
    dtype: str = ""
    """Empty for a value."""
    shape: Numbers = ()
    """Of the whole tensor."""
    offsets: Numbers = ()
    sizes: Numbers = ()
    """Of this shard."""
    is_shard: bool = False
    requires_grad: bool = False


@dataclass(frozen=True, slots=True)
class FlatState:
    """The present state, with one level of keys."""

    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]

    @property
    def fingerprint(self) -> object:
        """Compares equal while the plan still fits."""
        return [(key, _form(value)) for key, value in self.values.items()]


@dataclass(frozen=True, slots=True)
class LocalForm:
    """The form of a rank's state."""

    fingerprint: object
    """Of the state; the same while its plan may be used."""
    pieces: tuple[StatePiece, ...]
    indices: tuple[MetadataIndex, ...]


def plain(key: str) -> str:
    """The key without the names that `torch.compile` adds to those of a module."""
    return _COMPILED.sub("", key) if "_orig_mod." in key else key


def flatten(state: Mapping[str, Any]) -> FlatState:
    """Flatten as torch does, but ten times as fast; objects give their `state_dict`.

    Keys are plain, as from torch's `get_model_state_dict`: compiled or not, it is the same state.
    """
    flat = FlatState({}, {})
    asked = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}
    _collect("", (), asked, flat)
    return flat


def read_form(flat: FlatState) -> LocalForm:
    """The form of a state: its pieces, and how each is found in it."""
    try:
        items = create_default_local_save_plan(flat.values, is_coordinator=False).items
    except Exception as error:
        raise _of_unplanned(flat, error) from error
    return LocalForm(
        fingerprint=flat.fingerprint,
        pieces=tuple(_piece(flat, item) for item in items),
        indices=tuple(item.index for item in items),
    )


def _of_unplanned(flat: FlatState, error: Exception) -> Exception:
    """The error that names the value for which torch makes no plan."""
    for key, value in flat.values.items():
        try:
            create_default_local_save_plan({key: value}, is_coordinator=False)
        except Exception as own:  # noqa: BLE001 - as above
            return unsavable(key, value, own)
    return error


def is_bare(value: object) -> bool:
    """Whether its bytes can be copied as they are."""
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and isinstance(value, torch.Tensor)
        and is_strided(value)
    )


def found_at(flat: FlatState, index: MetadataIndex) -> Any:
    """The tensor of this rank, or the other value, at an index."""
    value = flat.values[index.fqn]
    if type(value) not in _PLAIN:
        value = find_state_dict_object(flat.values, index)
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value


def room_for(size: int) -> int:
    """The space to reserve for a value, whose size may change a little."""
    size += min(size // 4 + 512, _SPARE)
    return -(-size // _ALIGNED) * _ALIGNED


def fits(size: int, room: int) -> bool:
    """Whether a value of this size fits in a space of `room` bytes, and torch finds it there."""
    return size <= room <= size + (_MOST_SLACK if size >= _SMALL else _MOST_SLACK_OF_SMALL)


def _piece(flat: FlatState, item: WriteItem) -> StatePiece:
    value = found_at(flat, item.index)
    key, path = item.index.fqn, tuple(flat.paths[item.index.fqn])
    bare = is_bare(value)
    length = value.nbytes if bare else room_for(len(as_bytes(value, key)))
    if item.tensor_data is None:
        return StatePiece(key, path, length, bare)
    about = item.tensor_data
    return StatePiece(
        key=key,
        path=path,
        length=length,
        is_bare=bare,
        dtype=str(about.properties.dtype).removeprefix("torch."),
        shape=tuple(about.size),
        offsets=tuple(about.chunk.offsets),
        sizes=tuple(about.chunk.sizes),
        is_shard=item.type is WriteItemType.SHARD,
        requires_grad=about.properties.requires_grad,
    )


def _collect(
    prefix: str, path: tuple[Any, ...], mapping: Mapping[Any, Any], into: FlatState
) -> None:
    for key, value in mapping.items():
        own, kind = plain(str(key)), type(value)
        name = f"{prefix}{own}"
        if kind in _PLAIN:
            if name in into.values:
                raise _called_alike(name)
            into.values[name], into.paths[name] = value, (*path, own)
        elif kind in _DICTS:
            _collect(f"{name}.", (*path, own), value, into)
        else:
            values, paths = flatten_state_dict({own: value})
            if twice := into.values.keys() & {prefix + key for key in values}:
                raise _called_alike(min(twice))
            into.values.update({prefix + key: nested for key, nested in values.items()})
            into.paths.update({prefix + key: (*path, *rest) for key, rest in paths.items()})


def _called_alike(key: str) -> ValueError:
    return ValueError(f"two values of the state are called {key}: rename one")


def _form(value: object) -> object:
    if isinstance(value, DTensor):
        local = value.to_local()
        return (value.shape, value.placements, *_lies(local))
    return _lies(value) if isinstance(value, torch.Tensor) else None


def _lies(value: torch.Tensor) -> tuple[object, ...]:
    """The layout of its bytes in memory, which decides whether they are copied as they are."""
    about = value.shape, value.dtype, value.device, value.layout
    return (*about, value.is_conj(), value.is_neg()) if type(value) in _PLAIN else about
