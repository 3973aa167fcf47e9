"""Values that are not tensors of the state: their bytes, which hold no code, read and written."""

import io
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch.serialization import DEFAULT_PROTOCOL

from trainer_sdk.checkpoint.pickled_kinds import PickledValue
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.storage.pickle_data import ReadBudget, UnreadableBytesError, short
from trainer_sdk.checkpoint.storage.value_archive import (
    Item,
    ValueArchive,
    encoded,
    largest,
    with_record,
)
from trainer_sdk.checkpoint.value_record import RefusedValueError, record_of, value_of

_SMALL_ITEMS, _SMALL_BYTES = 64, 256
_LARGE_BYTES = 1 << 20
_MOST_SMALL = 4096
_small: dict[bytes, bytes] = {}
"""The bytes of small values, by their records: most of them are the same at each save."""


class UnreadableValueError(Exception):
    """A value that a restore would refuse; the text has its key and what to save instead."""


def read_value(octets: bytes, key: str) -> Any:
    """The value in these bytes: of plain data and tensors; `UnfitError` if they hold another."""
    try:
        archive, budget = ValueArchive(octets), ReadBudget.of(len(octets))
        items = archive.items()
        if items is None:
            return PickledValue(archive).value(budget)
        return value_of(items, octets, budget)
    except (UnreadableBytesError, MemoryError, RecursionError) as error:
        raise UnfitError(
            f"{key} cannot be read: {short(error)}; numbers, texts, lists, dicts, arrays and "
            "tensors can be read, and objects of other classes never"
        ) from error


def read_tensor(octets: bytes, key: str) -> torch.Tensor:
    """The tensor in these bytes; `UnfitError` if it is none."""
    value = read_value(octets, key)
    if not isinstance(value, torch.Tensor):
        raise UnfitError(f"{key} is of type {type(value).__name__} there, and should be a tensor")
    return value


def harmless(octets: bytes, key: str) -> bytes:
    """The same value in bytes that this process has written: torch's planner unpickles them."""
    written = io.BytesIO()
    torch.save(read_value(octets, key), written)
    return written.getvalue()


def as_bytes(value: object, key: str) -> bytes:
    """The bytes of a value, which torch can load; `UnreadableValueError` if no restore would."""
    try:
        items = record_of(value)
        if len(items) > _SMALL_ITEMS or largest(items) > _SMALL_BYTES:
            return with_record(_by_torch(value, items), items)
        octets = _small_bytes(value, items)
    except RefusedValueError as error:
        raise UnreadableValueError(
            f"{key}{error.path} is {_words(error.value)}, which no restore would read: "
            f"{_remedy(error.value)}"
        ) from error
    except Exception as error:
        raise unsavable(key, value, error) from error
    return octets


def _small_bytes(value: object, items: Sequence[Item]) -> bytes:
    record = encoded(items)
    if record not in _small:
        if len(_small) >= _MOST_SMALL:
            _small.clear()
        _small[record] = with_record(_by_torch(value, items), items)
    return _small[record]


def _by_torch(value: object, items: Sequence[Item]) -> bytes:
    """The output of `torch.save`; with large arrays as they are in memory, if there are any."""
    if isinstance(value, torch.Tensor):
        value = value.cpu().clone()
    octets = io.BytesIO()
    torch.save(
        value, octets, pickle_protocol=DEFAULT_PROTOCOL if largest(items) < _LARGE_BYTES else 4
    )
    return octets.getvalue()


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor on a CPU or a GPU."""
    return bool(
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _words(value: object) -> str:
    kind = type(value)
    named = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"of class {named}"


def unsavable(key: str, value: object, error: Exception) -> UnreadableValueError:
    """The error for a value that torch cannot save, with what to save instead."""
    why = str(error).partition("\n")[0]
    return UnreadableValueError(
        f"{key} is {_words(value)}, which torch.save refuses: {why}; {_remedy(value)}"
    )


def _remedy(value: object) -> str:
    """What to save instead."""
    return next(text for is_meant, text in _REMEDIES if is_meant(value))


_REMEDIES: tuple[tuple[Callable[[Any], bool], str], ...] = (
    (
        lambda value: hasattr(value, "state_dict") and hasattr(value, "load_state_dict"),
        "give it a name of its own at the top of the state: state_dict is not called deeper",
    ),
    (lambda value: type(value) is int, "save str(…) of so large a number"),
    (lambda value: isinstance(value, Enum), "save its .value"),
    (lambda value: hasattr(value, "__dataclass_fields__"), "save dataclasses.asdict(…) of it"),
    (lambda value: hasattr(value, "_asdict"), "save tuple(…) or its _asdict()"),
    (lambda value: isinstance(value, Mapping), "save dict(…) of it"),
    (lambda value: isinstance(value, torch.Generator), "save its get_state()"),
    (
        lambda value: isinstance(value, torch.Tensor) and value.is_meta,
        "it is on the meta device, where nothing has values: give it values first "
        "(module.to_empty(device=…) and its initialization)",
    ),
    (
        lambda value: isinstance(value, torch.Tensor),
        "save plain tensors: its parts, to_dense(), to_padded_tensor(…) or "
        "as_subclass(torch.Tensor)",
    ),
    (
        lambda value: bool(getattr(value, "fold", 0)),
        "save its timestamp(), as its fold would be lost",
    ),
    (
        lambda _: True,
        "save numbers, texts, lists, dicts, arrays and tensors instead, or an object with "
        "state_dict and load_state_dict at the top of the state",
    ),
)
