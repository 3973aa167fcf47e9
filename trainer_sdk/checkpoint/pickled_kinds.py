"""What the names in a pickle of torch mean: values of `value_kinds.py`, made of checked parts.

Only the pickles of older releases, and those that torch or others have written, are read so.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from typing import Any
from uuid import UUID

import torch

from trainer_sdk.checkpoint.storage.pickle_data import (
    NAMED,
    STORED,
    DescribedCall,
    Name,
    ReadBudget,
    TreeBuilder,
    parse,
    short,
)
from trainer_sdk.checkpoint.storage.pickled_values import CHANGED, is_known
from trainer_sdk.checkpoint.storage.value_archive import ValueArchive
from trainer_sdk.checkpoint.value_kinds import (
    KINDS,
    array_of,
    compressed_of,
    decimal_of,
    expect,
    fraction_of,
    layout_of,
    number_of,
    numpy_type_of,
    quantized_by_channel_of,
    quantized_of,
    size_of,
    sparse_of,
    tensor_of,
    timezone_of,
)
from trainer_sdk.checkpoint.value_record import filled

_SCHEMES = {str(scheme): scheme for scheme in (torch.per_tensor_affine, torch.per_channel_affine)}
_INTEGERS = {"QUInt8Storage": torch.uint8, "QInt8Storage": torch.int8, "QInt32Storage": torch.int32}
_DTYPES = {
    **{name: kind for kind, name in torch.storage._dtype_to_storage_type_map().items()},  # noqa: SLF001 - how torch writes them
    "UntypedStorage": torch.uint8,
    **_INTEGERS,
}
_YEAR_HIGH = 256


@dataclass(frozen=True, slots=True)
class _Storage:
    """A storage of torch: its elements, with their type."""

    elements: torch.Tensor


class PickledValue:
    """The pickle in an archive, read as data."""

    def __init__(self, archive: ValueArchive) -> None:
        self._archive = archive
        self._files: dict[str, torch.Tensor] = {}

    def value(self, budget: ReadBudget) -> Any:
        """Its value; `UnreadableBytesError` if it is not plain data."""
        described = parse(self._archive.pickled, is_known, CHANGED)
        return TreeBuilder(self._made, budget).build(described)

    def _made(self, call: DescribedCall, builder: TreeBuilder) -> Any:  # noqa: PLR0911 - one for each form
        name = call.name
        if name == NAMED:
            return _named(call.args[0])
        if name == "torch._tensor._rebuild_from_type_v2":  # attributes are not kept
            function, _, args, _ = call.args
            return self._made(
                DescribedCall(expect(function, Name).text, expect(args, tuple)), builder
            )
        args = [builder.build(arg, is_argument=True) for arg in call.args]
        if name == STORED:
            return self._storage(builder.budget, *args)
        if name in ("builtins.set", "builtins.frozenset"):
            members = args[0] if args else []
            return filled(name.removeprefix("builtins."), members, builder.budget)
        if name in ("collections.OrderedDict", "collections.Counter"):
            return _mapping(call, builder, *args)
        if name in _STATEFUL:
            return _STATEFUL[name](builder.build(call.state), *args)
        return _CALLS[name](*args)

    def _storage(
        self, budget: ReadBudget, mark: str, kind: Name, key: str, _: str, count: int
    ) -> _Storage:
        name = expect(kind, Name).text.rpartition(".")[2]
        if mark != "storage" or name not in _DTYPES:
            raise ValueError(f"it refers to {short(mark)}, {short(name)}")
        if key not in self._files:
            octets = self._archive.file(f"data/{expect(key, str)}")
            budget.copy(len(octets))
            self._files[key] = tensor_of("uint8", octets, len(octets))
        dtype = _DTYPES[name]
        return _Storage(self._files[key][: expect(count, int) * dtype.itemsize].view(dtype))


def _named(text: Any) -> Any:
    """The value of a name that stands for one: a type of tensors, or a scheme of quantization."""
    name = text.removeprefix("torch.")
    if text.startswith("torch.") and isinstance(value := getattr(torch, name, None), torch.dtype):
        return value
    return _SCHEMES[text]


def _mapping(call: DescribedCall, builder: TreeBuilder, *content: Any) -> Any:
    made: Any = OrderedDict() if call.name == "collections.OrderedDict" else Counter()
    if content and type(content[0]) is dict:
        made.update(content[0])
    elif content:
        made.update(expect(pair, list, tuple) for pair in content[0])
    return builder.mapping(call.pairs, made)


def _tensor(
    stored: _Storage,
    offset: int,
    size: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    _hooks: object,
    bits: dict[str, bool] | None = None,
) -> torch.Tensor:
    elements = expect(stored, _Storage).elements
    size, stride = tuple(size_of(*size)), tuple(size_of(*stride))
    if len(size) != len(stride) or min((*size, *stride, offset), default=0) < 0:
        raise ValueError("a tensor has a shape that it cannot have")
    stride = tuple(step if n > 1 else 1 for n, step in zip(size, stride, strict=True))
    end = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    if 0 not in size and end > len(elements):
        raise ValueError("a tensor is larger than its storage")
    tensor: torch.Tensor = elements.as_strided(size, stride, offset if 0 not in size else 0)
    for bit, kind in (("conj", "conjugate"), ("neg", "negative")):
        if bits and expect(bits.get(bit, False), bool):
            tensor = KINDS[kind].make(tensor)
    if expect(requires_grad, bool):
        tensor.requires_grad_()
    return tensor


def _tensor_of_type(stored: _Storage, *args: Any) -> torch.Tensor:
    offset, size, stride, requires_grad, hooks, dtype, *bits = args
    kind = expect(_named(expect(dtype, Name).text), torch.dtype)
    typed = _Storage(expect(stored, _Storage).elements.view(kind))
    return _tensor(typed, offset, size, stride, requires_grad, hooks, *bits)


def _quantized(stored: _Storage, *args: Any) -> torch.Tensor:
    offset, size, stride, (scheme, *parameters), requires_grad, hooks = args
    integers = _tensor(stored, offset, size, stride, requires_grad, hooks)
    if scheme == torch.per_tensor_affine:
        return quantized_of(integers, *parameters)
    return quantized_by_channel_of(integers, *parameters)


def _sparse(layout: torch.layout, data: tuple[Any, ...]) -> torch.Tensor:
    if layout == torch.sparse_coo:
        indices, values, size, *coalesced = data
        return sparse_of(indices, values, size, coalesced[0] if coalesced else None)
    return compressed_of(str(layout), *data)


def _parameter(data: torch.Tensor, requires_grad: bool, *_: object) -> torch.nn.Parameter:
    return torch.nn.Parameter(data, expect(requires_grad, bool))


def _datetime(state: bytes, *zone: Any) -> datetime:
    high, low, month, day, hour, minute, second, *micro = expect(state, bytes)
    return datetime(  # noqa: DTZ001 - as it was saved
        high * _YEAR_HIGH + low,
        month,
        day,
        hour,
        minute,
        second,
        int.from_bytes(bytes(micro), "big"),
        *zone,
    )


def _time(state: bytes, *zone: Any) -> time:
    hour, minute, second, *micro = expect(state, bytes)
    return time(hour, minute, second, int.from_bytes(bytes(micro), "big"), *zone)


def _date(state: bytes) -> date:
    high, low, month, day = expect(state, bytes)
    return date(high * _YEAR_HIGH + low, month, day)


def _array(state: tuple[Any, ...], *_: object) -> Any:
    _, shape, kind, by_columns, content = state
    return array_of(kind, shape, "F" if by_columns else "C", content)


def _buffered(octets: bytes | bytearray, kind: Any, shape: tuple[int, ...], order: str) -> Any:
    return array_of(kind, shape, order, bytes(expect(octets, bytes, bytearray)))


def _data_type(state: tuple[Any, ...], code: str, *_: object) -> Any:
    """A data type of numpy, which a pickle describes by a code and what it sets afterwards."""
    import numpy as np

    _, order, base, names, fields, size, *rest = state
    if base is not None:
        kind, shape = base
        return np.dtype((kind, tuple(expect(length, int) for length in shape)))
    if names is not None:
        described: Any = {
            "names": list(names),
            "formats": [fields[name][0] for name in names],
            "offsets": [expect(fields[name][1], int) for name in names],
            "itemsize": expect(size, int),
        }
        return np.dtype(described)
    unit = ""
    if code in ("M8", "m8") and len(rest) > 2:
        _, (name, count, _, _) = rest[2]
        unit = f"[{expect(count, int)}{name.decode()}]"
    flexible = size if code[:1] in "SUV" and not code[1:] else ""
    return numpy_type_of(f"{expect(order, str)}{expect(code, str)}{flexible}{unit}")


def _encoded(text: str, coding: str) -> bytes:
    if coding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes are written as {short(coding)}")
    octets: bytes = expect(text, str).encode("latin-1")
    return octets


_STATEFUL: dict[str, Callable[..., Any]] = {
    **{f"numpy.{core}.multiarray._reconstruct": _array for core in ("_core", "core")},
    "numpy.dtype": _data_type,
    "uuid.UUID": lambda state: UUID(int=expect(expect(state, dict)["int"], int)),
}
_CALLS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _encoded,
    "builtins.bytes": lambda *it: bytes(expect(it[0], bytes)) if it else b"",
    "builtins.bytearray": lambda text="", *coding: bytearray(
        _encoded(text, *coding) if coding else expect(text or b"", bytes)
    ),
    "builtins.complex": KINDS["complex"].make,
    "builtins.range": range,
    "builtins.slice": slice,
    "datetime.date": _date,
    "datetime.datetime": _datetime,
    "datetime.time": _time,
    "datetime.timedelta": timedelta,
    "datetime.timezone": timezone_of,
    "decimal.Decimal": decimal_of,
    "fractions.Fraction": fraction_of,
    **{
        f"{module}.{name}": KINDS[f"pathlib.{name}"].make
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{f"numpy.{core}.multiarray.scalar": number_of for core in ("_core", "core")},
    **{f"numpy.{core}.numeric._frombuffer": _buffered for core in ("_core", "core")},
    "torch.Size": lambda lengths: size_of(*lengths),
    "torch.device": lambda kind, *number: torch.device(
        expect(kind, str), *(expect(part, int) for part in number)
    ),
    "torch.nn.parameter.Parameter": _parameter,
    "torch.serialization._get_layout": layout_of,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_qtensor": _quantized,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor_of_type,
}
