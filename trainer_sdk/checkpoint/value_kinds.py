"""The kinds of values that are not tensors of the state: their parts, and how each is made of them.

A record (`storage/value_archive.py`) makes values of these kinds only, and a pickle of those that
torch writes for them (`pickled_kinds.py`). Each is made here, of parts that are checked; nothing
that stands in a file is called, imported or given a state.
"""

import math
import re
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import PosixPath, PurePosixPath
from typing import Any
from uuid import UUID

import torch

_MOST_DIGITS = 10_000
_FRACTION = re.compile(r"[-+]?\d+(/\d+)?")
_NUMPY_TYPE = re.compile(r"[<>|=]?[?biufcSUVMmO]\d*(\[\d*[a-zA-Zμ]+(/\d+)?\])?")
_LAYOUTS = {
    str(layout): layout
    for layout in (
        torch.strided,
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    )
}
_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_INT = frozenset({int})
_QUANTIZED = frozenset({torch.quint8, torch.qint8, torch.qint32})

Parts = Sequence[Any]


@dataclass(frozen=True, slots=True)
class ValueKind:
    """A kind of values."""

    parts: Callable[[Any], Parts]
    """The parts of a value, each of them a value."""
    make: Callable[..., Any]
    """The value of such parts; any exception if they are others."""


def expect(value: Any, *kinds: type) -> Any:
    """The value, if it has one of these types."""
    if type(value) not in kinds:
        raise TypeError(f"a part is of type {type(value).__name__}")
    return value


def decimal_of(text: str) -> Decimal:
    """A decimal number, whose digits are limited."""
    if len(expect(text, str)) > _MOST_DIGITS:
        raise ValueError(f"a decimal number has {len(text)} digits")
    return Decimal(text)


def fraction_of(numerator: Any, denominator: Any = 1) -> Fraction:
    """Of two integers, or a text of digits: no exponent, which would ask for gigabytes."""
    if type(numerator) is str and not _FRACTION.fullmatch(numerator[:_MOST_DIGITS]):
        raise ValueError("a fraction is not of digits")
    if type(numerator) is str:
        return Fraction(numerator)
    return Fraction(expect(numerator, int), expect(denominator, int))


def size_of(*lengths: int) -> torch.Size:
    """A size of a tensor."""
    if not _INT.issuperset(map(type, lengths)):
        raise TypeError("a length is not an integer")
    return torch.Size(lengths)


def dtype_of(name: str) -> torch.dtype:
    """A type of torch's tensors, as `float32`."""
    dtype: torch.dtype = expect(getattr(torch, expect(name, str), None), torch.dtype)
    return dtype


def layout_of(name: str) -> torch.layout:
    """A layout of torch's tensors, as `torch.sparse_coo`."""
    return _LAYOUTS[name]


def timezone_of(offset: timedelta, *name: str) -> timezone:
    """A fixed distance from UTC."""
    return timezone(offset, *name)


def tensor_of(dtype: str, octets: bytes, *shape: int) -> torch.Tensor:
    """A dense tensor on the CPU."""
    kind, size = dtype_of(dtype), size_of(*shape)
    if math.prod(size) * kind.itemsize != len(octets) or min(size, default=0) < 0:
        raise ValueError(f"{len(octets)} bytes are not a tensor of {dtype} and shape {tuple(size)}")
    if not octets:
        return torch.empty(size, dtype=kind, device="cpu")
    return torch.frombuffer(bytearray(octets), dtype=torch.uint8).view(kind).view(size)


def sparse_of(
    indices: torch.Tensor, values: torch.Tensor, shape: Sequence[int], coalesced: bool | None
) -> torch.Tensor:
    """A sparse tensor by coordinates, whose indices are compared with its shape."""
    return torch.sparse_coo_tensor(
        indices, values, size_of(*shape), is_coalesced=coalesced, check_invariants=True
    )


def compressed_of(
    layout: str, compressed: torch.Tensor, plain: torch.Tensor, values: torch.Tensor, shape: Parts
) -> torch.Tensor:
    """A sparse tensor by compressed indices, which are compared with its shape."""
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size_of(*shape), layout=layout_of(layout), check_invariants=True
    )


def quantized_of(integers: torch.Tensor, scale: float, zero_point: int) -> torch.Tensor:
    """A tensor that is quantized by one scale."""
    return torch._make_per_tensor_quantized_tensor(integers, scale, zero_point)  # noqa: SLF001


def quantized_by_channel_of(
    integers: torch.Tensor, scales: torch.Tensor, zero_points: torch.Tensor, axis: int
) -> torch.Tensor:
    """A tensor that is quantized by a scale for each channel."""
    if not 0 <= axis < integers.ndim or scales.shape != (integers.shape[axis],):
        raise ValueError("a quantized tensor has not a scale for each channel")
    if zero_points.shape != scales.shape:
        raise ValueError("a quantized tensor has not a zero point for each channel")
    return torch._make_per_channel_quantized_tensor(  # noqa: SLF001
        integers, scales, zero_points, axis
    )


def numpy_type_of(description: Any) -> Any:
    """A data type of numpy, by its text, its list of fields, or its pair of type and shape."""
    import numpy as np

    if type(description) is str:
        if not _NUMPY_TYPE.fullmatch(description):
            raise ValueError("it has a data type that numpy has not")
        return np.dtype(description)
    if type(description) is tuple:
        base, shape = description
        return np.dtype((numpy_type_of(base), tuple(expect(length, int) for length in shape)))
    fields = [
        (name, numpy_type_of(kind), *map(tuple, shape))
        for name, kind, *shape in expect(description, list)
    ]
    return np.dtype(fields)


def array_of(kind: Any, shape: Sequence[int], order: str, content: Any) -> Any:
    """An array of numpy, of its bytes; of its members if they are objects."""
    import numpy as np

    kind, size = _numpy_type(kind), tuple(expect(length, int) for length in shape)
    count = math.prod(size)
    if kind.hasobject:
        if min(size, default=0) < 0 or len(expect(content, list)) != count:
            raise ValueError("an array has not as many members as its shape")
        flat = np.empty(count, kind)
        for number, member in enumerate(content):
            flat[number] = member
        return flat.reshape(size, order="F" if order == "F" else "C")
    if len(expect(content, bytes)) != count * kind.itemsize or min(size, default=0) < 0:
        raise ValueError("an array has not as many bytes as its shape")
    return np.ndarray(size, kind, bytearray(content), order="F" if order == "F" else "C")


def number_of(kind: Any, content: bytes) -> Any:
    """A number, text or time of numpy."""
    return array_of(kind, (), "C", content)[()]


def _numpy_type(kind: Any) -> Any:
    import numpy as np

    if not isinstance(kind, np.dtype):
        raise TypeError("a part is not a data type")
    return kind


def _parts_of_array(value: Any) -> Parts:
    is_by_columns = value.flags.f_contiguous and not value.flags.c_contiguous
    order = "F" if is_by_columns else "C"
    if value.dtype.hasobject:
        content: Any = list(value.ravel(order))
    else:
        content = value.tobytes(order)
    return value.dtype, value.shape, order, content


def _description_of(kind: Any) -> Any:
    """The description of a data type; `TypeError` for those of extensions of numpy."""
    import numpy as np

    described = _plain_description(np.lib.format.dtype_to_descr(kind))
    if numpy_type_of(described) != kind:
        raise TypeError(f"numpy cannot describe {kind}")
    return described


def _plain_description(described: Any) -> Any:
    if isinstance(described, list):
        return [(n, _plain_description(kind), *shape) for n, kind, *shape in described]
    return described


def _parts_of_tensor(value: torch.Tensor) -> Parts:
    plain = value.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(value.dtype).removeprefix("torch."), plain.numpy().tobytes(), *value.shape


def _clock(value: time | datetime) -> Parts:
    if value.fold:
        raise ValueError("its fold would be lost")
    return value.hour, value.minute, value.second, value.microsecond, value.tzinfo


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(value.shape)


KINDS: dict[str, ValueKind] = {
    "int": ValueKind(
        lambda it: (it.to_bytes(it.bit_length() // 8 + 1, "little", signed=True),),
        lambda octets: int.from_bytes(expect(octets, bytes), "little", signed=True),
    ),
    "str": ValueKind(
        lambda it: (it.encode("utf-8", "surrogatepass"),),
        lambda octets: octets.decode("utf-8", "surrogatepass"),
    ),
    "complex": ValueKind(
        lambda it: (it.real, it.imag), lambda *it: complex(*(expect(part, float) for part in it))
    ),
    "bytearray": ValueKind(
        lambda it: (bytes(it),), lambda octets: bytearray(expect(octets, bytes))
    ),
    "range": ValueKind(lambda it: (it.start, it.stop, it.step), range),
    "slice": ValueKind(lambda it: (it.start, it.stop, it.step), slice),
    "datetime.date": ValueKind(lambda it: (it.year, it.month, it.day), date),
    "datetime.time": ValueKind(_clock, time),
    "datetime.datetime": ValueKind(lambda it: (it.year, it.month, it.day, *_clock(it)), datetime),
    "datetime.timedelta": ValueKind(
        lambda it: (it.days, it.seconds, it.microseconds),
        lambda *it: timedelta(*(expect(part, int) for part in it)),
    ),
    "datetime.timezone": ValueKind(lambda it: it.__getinitargs__(), timezone_of),
    "decimal.Decimal": ValueKind(lambda it: (str(it),), decimal_of),
    "fractions.Fraction": ValueKind(lambda it: (it.numerator, it.denominator), fraction_of),
    "pathlib.PosixPath": ValueKind(lambda it: it.parts, PosixPath),
    "pathlib.PurePosixPath": ValueKind(lambda it: it.parts, PurePosixPath),
    "uuid.UUID": ValueKind(lambda it: (it.bytes,), lambda octets: UUID(bytes=octets)),
    "numpy.dtype": ValueKind(lambda it: (_description_of(it),), numpy_type_of),
    "numpy.ndarray": ValueKind(_parts_of_array, array_of),
    "numpy.generic": ValueKind(lambda it: (it.dtype, it.tobytes()), number_of),
    "torch.Size": ValueKind(tuple, size_of),
    "torch.dtype": ValueKind(lambda it: (str(it).removeprefix("torch."),), dtype_of),
    "torch.device": ValueKind(lambda it: (str(it),), lambda name: torch.device(expect(name, str))),
    "torch.layout": ValueKind(lambda it: (str(it),), layout_of),
    "torch.Tensor": ValueKind(_parts_of_tensor, tensor_of),
    "requires_grad": ValueKind(lambda it: (it.detach(),), lambda it: it.requires_grad_()),
    "torch.nn.Parameter": ValueKind(
        lambda it: (it.detach(), it.requires_grad),
        lambda tensor, requires: torch.nn.Parameter(tensor, expect(requires, bool)),
    ),
    "conjugate": ValueKind(lambda it: (it.conj(),), torch.conj),
    "negative": ValueKind(lambda it: (torch._neg_view(it),), torch._neg_view),  # noqa: SLF001
    "sparse": ValueKind(
        lambda it: (it._indices(), it._values(), _shape(it), it.is_coalesced()),  # noqa: SLF001
        sparse_of,
    ),
    "compressed_by_rows": ValueKind(
        lambda it: (str(it.layout), it.crow_indices(), it.col_indices(), it.values(), _shape(it)),
        compressed_of,
    ),
    "compressed_by_columns": ValueKind(
        lambda it: (str(it.layout), it.ccol_indices(), it.row_indices(), it.values(), _shape(it)),
        compressed_of,
    ),
    "quantized": ValueKind(
        lambda it: (it.int_repr(), it.q_scale(), it.q_zero_point()), quantized_of
    ),
    "quantized_by_channel": ValueKind(
        lambda it: (
            it.int_repr(),
            it.q_per_channel_scales(),
            it.q_per_channel_zero_points(),
            it.q_per_channel_axis(),
        ),
        quantized_by_channel_of,
    ),
}
CONTAINERS: dict[str, type] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "collections.OrderedDict": OrderedDict,
    "collections.Counter": Counter,
}
"""They have any values as parts; dictionaries have keys and values, in turn."""
_OF_TYPE: dict[type, str] = {
    **{kind: name for name, kind in CONTAINERS.items()},
    int: "int",
    str: "str",
    complex: "complex",
    bytearray: "bytearray",
    range: "range",
    slice: "slice",
    date: "datetime.date",
    time: "datetime.time",
    datetime: "datetime.datetime",
    timedelta: "datetime.timedelta",
    timezone: "datetime.timezone",
    Decimal: "decimal.Decimal",
    Fraction: "fractions.Fraction",
    PosixPath: "pathlib.PosixPath",
    PurePosixPath: "pathlib.PurePosixPath",
    UUID: "uuid.UUID",
    torch.Size: "torch.Size",
    torch.dtype: "torch.dtype",
    torch.device: "torch.device",
    torch.layout: "torch.layout",
    torch.nn.Parameter: "torch.nn.Parameter",
}


def kind_of(value: object) -> str:
    """The name of the kind of a value; empty if it is of none."""
    kind = type(value)
    if kind is torch.Tensor:
        return _kind_of_tensor(value)  # type: ignore[arg-type]
    if (name := _OF_TYPE.get(kind)) is not None:
        return name
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return ""
    if kind is numpy.ndarray:
        return "numpy.ndarray"
    if isinstance(value, numpy.generic) and not value.dtype.hasobject:
        return "numpy.generic" if value.dtype.type is kind else ""
    return "numpy.dtype" if isinstance(value, numpy.dtype) else ""


def _kind_of_tensor(tensor: torch.Tensor) -> str:
    of_bits = {
        "requires_grad": tensor.requires_grad,
        "conjugate": tensor.is_conj(),
        "negative": tensor.is_neg(),
    }
    if kind := next((name for name, is_set in of_bits.items() if is_set), ""):
        return kind
    if tensor.layout == torch.sparse_coo:
        return "sparse"
    if tensor.layout in _LAYOUTS.values() and tensor.layout != torch.strided:
        return f"compressed_by_{'rows' if tensor.layout in _BY_ROWS else 'columns'}"
    if tensor.dtype in _QUANTIZED:
        is_simple = tensor.qscheme() == torch.per_tensor_affine
        return "quantized" if is_simple else "quantized_by_channel"
    is_plain = tensor.layout == torch.strided and tensor.device.type in ("cpu", "cuda")
    return "torch.Tensor" if is_plain and not tensor.is_nested else ""
