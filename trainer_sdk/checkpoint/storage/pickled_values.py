"""Decides by names which pickled values of a checkpoint a restore reads; needs no torch.

A pickle may name any function. A restore reads it as data, and knows only the names below, which
stand for data; it makes that data itself.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from trainer_sdk.checkpoint.storage.pickle_data import (
    DescribedCall,
    UnreadableBytesError,
    parse,
    short,
)
from trainer_sdk.checkpoint.storage.value_archive import KINDS, Made, ValueArchive


def _names(modules: str, names: str) -> frozenset[str]:
    """Each of these names, in each of these modules."""
    return frozenset(f"{module}.{name}" for module in modules.split() for name in names.split())


_PATHS = _names("pathlib pathlib._local", "PosixPath PurePosixPath")
_RECONSTRUCTED = _names("numpy._core.multiarray numpy.core.multiarray", "_reconstruct")
_DATA = (
    _PATHS
    | _RECONSTRUCTED
    | _names("numpy._core.multiarray numpy.core.multiarray", "scalar")
    | _names("numpy._core.numeric numpy.core.numeric", "_frombuffer")
    | _names("numpy", "dtype ndarray")
    | _names("builtins", "bytearray bytes complex frozenset range set slice")
    | _names("collections", "Counter OrderedDict")
    | _names("datetime", "date datetime time timedelta timezone")
    | {"_codecs.encode", "decimal.Decimal", "fractions.Fraction", "uuid.UUID"}
    | {"torch._tensor._rebuild_from_type_v2", "torch.nn.parameter.Parameter"}
    | {"torch.serialization._get_layout"}
    | _names("torch._utils", "_rebuild_parameter _rebuild_parameter_with_state _rebuild_qtensor")
    | _names("torch._utils", "_rebuild_sparse_tensor _rebuild_tensor_v2 _rebuild_tensor_v3")
)
_MODULES_OF_TORCH = frozenset({"torch", "torch.cuda", "torch.sparse", "torch.storage"})
_DESCRIPTIONS = "torch.distributed.checkpoint."
_DESCRIBING = _names(
    f"{_DESCRIPTIONS}metadata",
    "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex StorageMeta "
    "TensorProperties TensorStorageMetadata",
) | {f"{_DESCRIPTIONS}filesystem._StorageInfo"}
_ALSO_IN_METADATA = (
    _PATHS
    | _names("pathlib pathlib._local", "Path")
    | {f"{_DESCRIPTIONS}metadata._MEM_FORMAT_ENCODING", "collections.OrderedDict"}
    | {"torch.Size", "torch.serialization._get_layout"}
)
CHANGED = (
    _RECONSTRUCTED | _names("collections", "Counter OrderedDict") | {"numpy.dtype", "uuid.UUID"}
)
"""The names of values that a pickle makes in two steps."""


def is_known(named: str) -> bool:
    """Whether a value may have this name in it."""
    module, _, name = named.rpartition(".")
    if named in _DATA:
        return True
    is_type = name.islower() or name.endswith(("Tensor", "Storage")) or name == "Size"
    return module in _MODULES_OF_TORCH and is_type


def why_unread(octets: bytes) -> str:
    """Why a restore refuses this value; empty if it reads it."""
    try:
        archive = ValueArchive(octets)
        items = archive.items()
        if items is None:
            parse(archive.pickled, is_known, CHANGED)
        else:
            kinds = {item.kind for item in items if type(item) is Made}
            if unknown := sorted(kinds - KINDS):
                return f"it is, or has in it, {unknown[0]}"
    except UnreadableBytesError as error:
        return str(error)
    return ""


def parsed_metadata(metadata: bytes) -> DescribedCall:
    """What torch's `.metadata` describes."""
    described = parse(metadata, _is_description, _DESCRIBING | {"collections.OrderedDict"})
    if (
        type(described) is not DescribedCall
        or described.name != f"{_DESCRIPTIONS}metadata.Metadata"
    ):
        raise UnreadableBytesError("it is not what torch writes")
    return described


class DescribedTensor(NamedTuple):
    """What torch says of a tensor or another value."""

    is_tensor: bool
    size: tuple[int, ...] = ()
    parts: tuple[tuple[int, ...], ...] = ()
    """The sizes of its parts."""


class StoredPlace(NamedTuple):
    """Where a value, or a part of a tensor, is stored."""

    key: str
    file: str
    offset: int
    length: int


def descriptions_in(metadata: bytes) -> tuple[dict[str, DescribedTensor], list[StoredPlace]]:
    """The descriptions of tensors and values, by key, and the places of all parts."""
    whole = parsed_metadata(metadata)
    try:
        fields = _fields(whole)
        kinds = {key: _description(kind) for key, kind in _items(fields["state_dict_metadata"])}
        places = [_place(index, at) for index, at in _items(fields["storage_data"])]
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise UnreadableBytesError(f"it is not what torch writes: {short(error)}") from error
    return kinds, places


def _description(kind: Any) -> DescribedTensor:
    if kind.name.endswith(".BytesStorageMetadata"):
        return DescribedTensor(is_tensor=False)
    about = _fields(kind)
    parts = tuple(_numbers(_fields(chunk)["sizes"]) for chunk in about["chunks"])
    return DescribedTensor(is_tensor=True, size=_numbers(about["size"]), parts=parts)


def _place(index: Any, at: Any) -> StoredPlace:
    stored = _fields(at)
    path = stored["relative_path"]
    parts = path.args if type(path) is DescribedCall else (path,)
    file = "/".join(map(str, parts))
    key = _fields(index)["fqn"]
    if type(key) is not str:
        raise TypeError(f"a part is of {short(key)}")
    offset, length = int(stored["offset"]), int(stored["length"])
    if min(offset, length) < 0:
        raise ValueError(f"{key} begins at {offset} and has {length} bytes")
    return StoredPlace(key, file, offset, length)


def _numbers(size: Any) -> tuple[int, ...]:
    return tuple(map(int, size.args[0]))


def _items(mapping: Any) -> Iterator[tuple[Any, Any]]:
    return zip(mapping.pairs[::2], mapping.pairs[1::2], strict=True)


def _is_description(named: str) -> bool:
    module, _, name = named.rpartition(".")
    is_type = module == "torch" and name.islower() and name.isidentifier()
    if is_type or named in _DESCRIBING or named in _ALSO_IN_METADATA:
        return True
    raise UnreadableBytesError(f"it names {short(named)}, which describes no tensor")


def _fields(call: Any) -> dict[str, Any]:
    """What a description sets, by name."""
    fields: dict[str, Any] = call.state.fields()
    return fields
