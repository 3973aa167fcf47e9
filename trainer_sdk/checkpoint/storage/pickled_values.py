"""Decides by names which pickled values of a checkpoint a restore reads; needs no torch.

Values that are not tensors are pickles, and a pickle may call any function that it names. A restore
calls only the names below, which construct data and do nothing else.
"""

import _compat_pickle
import io
import pickle  # noqa: TID251 - only the stand-ins below are ever called
import pickletools
import zipfile
from collections.abc import Iterator
from typing import Any

DATA = frozenset(
    {
        *(f"builtins.{name}" for name in ("bytes", "frozenset", "range", "slice")),
        *(f"datetime.{name}" for name in ("date", "datetime", "time", "timedelta", "timezone")),
        *(
            f"{module}.{name}"
            for module in ("pathlib", "pathlib._local")
            for name in ("PosixPath", "PurePosixPath")
        ),
        *(
            f"numpy.{core}.multiarray.{name}"
            for core in ("_core", "core")
            for name in ("_reconstruct", "scalar")
        ),
        "decimal.Decimal",
        "fractions.Fraction",
        "numpy.dtype",
        "numpy.ndarray",
        "uuid.UUID",
    }
)
"""The names that a restore allows in addition to torch's `weights_only=True`."""
_OF_TORCH = frozenset(
    {
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.complex",
        "builtins.set",
        "collections.Counter",
        "collections.OrderedDict",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.serialization._get_layout",
    }
)
_MODULES_OF_TORCH = frozenset({"torch", "torch.cuda", "torch.sparse", "torch.storage"})
_UNREAD_OPCODES = frozenset({"LONG4"})
_DESCRIPTIONS = "torch.distributed.checkpoint."


class UnreadablePickleError(Exception):
    """A restore refuses this pickle; the text says why."""


class Described:
    """A stand-in for a class of torch that describes tensors."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update(part)

    def __hash__(self) -> int:
        return hash(str(self.__dict__.get("fqn")))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Described) and self.__dict__ == other.__dict__


class Bytes(Described):
    """A stand-in for torch's description of a value that is not a tensor."""


def values_in(metadata: bytes) -> Iterator[tuple[str, str, int, int]]:
    """For each value that is not a tensor: its key, file, offset and length."""
    kinds, places = descriptions_in(metadata)
    try:
        for index, place in places.items():
            if isinstance(kinds.get(index.fqn), Bytes):
                yield index.fqn, str(place.relative_path), int(place.offset), int(place.length)
    except Exception as error:
        raise UnreadablePickleError(f"it is not what torch writes: {error}") from error


def descriptions_in(metadata: bytes) -> tuple[dict[str, Any], dict[Any, Any]]:
    """The descriptions of values, by key, and of their places, by index."""
    try:
        described = _Reader(io.BytesIO(metadata)).load()
        return dict(described.state_dict_metadata), dict(described.storage_data)
    except UnreadablePickleError:
        raise
    except Exception as error:
        raise UnreadablePickleError(f"it is not what torch writes: {error}") from error


def why_unread(octets: bytes) -> str:
    """Why a restore refuses this value; empty if it reads it."""
    try:
        with zipfile.ZipFile(io.BytesIO(octets)) as archive:
            name = next(member for member in archive.namelist() if member.endswith("/data.pkl"))
            pickled = archive.read(name)
        for opcode, argument, _ in pickletools.genops(pickled):
            if opcode.name in _UNREAD_OPCODES:
                return "it has a number of more than 255 bytes"
            if opcode.name == "GLOBAL" and not _is_read(named := _name_of(argument)):
                return f"it is, or has in it, {named}"
            if opcode.name == "STACK_GLOBAL":
                return "it was pickled by a later protocol than torch reads"
    except (zipfile.BadZipFile, StopIteration, ValueError, OSError) as error:
        return f"it is not what torch writes: {error}"
    return ""


def _name_of(argument: Any) -> str:
    """The full name in Python 3."""
    module, _, name = str(argument).partition(" ")
    if (module, name) in _compat_pickle.NAME_MAPPING:
        module, name = _compat_pickle.NAME_MAPPING[module, name]
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _is_read(named: str) -> bool:
    module, _, name = named.rpartition(".")
    if named in DATA or named in _OF_TORCH or named.startswith("torch._utils._rebuild_"):
        return True
    is_type = name.islower() or name.endswith(("Tensor", "Storage")) or name == "Size"
    return module in _MODULES_OF_TORCH and is_type


class _Reader(pickle.Unpickler):
    """Reads torch's descriptions of tensors as stand-ins, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(_DESCRIPTIONS):
            return Bytes if name == "BytesStorageMetadata" else Described
        plain = {"collections.OrderedDict": dict, "torch.Size": tuple}.get(f"{module}.{name}")
        if plain is not None:
            return plain
        if module in ("pathlib", "pathlib._local"):
            return _joined
        if module == "torch" or (module, name) == ("torch.serialization", "_get_layout"):
            return Described if name == "_get_layout" else Described()
        raise UnreadablePickleError(f"it names {module}.{name}, which describes no tensor")


def _joined(*parts: str) -> str:
    return "/".join(parts)
