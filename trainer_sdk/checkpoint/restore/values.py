"""Values that are not tensors: reads them without calling code, and checks them at the save."""

import importlib
import io
import threading
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from functools import lru_cache
from typing import Any

import torch

from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.storage.pickled_values import DATA, why_unread

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
_CONTAINERS = frozenset({list, tuple, set, frozenset})
_LARGEST_BITS = 2000
_ELSEWHERE = {"pathlib._local": "pathlib", "numpy.core.multiarray": "numpy._core.multiarray"}
"""The modules in the installed releases, for names of other releases."""
_reading = threading.Lock()


class UnreadableValueError(Exception):
    """A value that a restore would refuse; the text has its key and what to save instead."""


def read_value(octets: bytes | bytearray, key: str) -> Any:
    """Unpickle a value that consists of plain data and tensors; `UnfitError` otherwise."""
    try:
        # torch keeps the allowed names for the whole process.
        with _reading, torch.serialization.safe_globals(_allowed(b"numpy" in octets)):
            return torch.load(io.BytesIO(octets), map_location="cpu", weights_only=True)
    except Exception as error:
        reason = why_unread(bytes(octets)) or str(error).strip().partition("\n")[0]
        raise UnfitError(
            f"{key} cannot be read: {reason}; numbers, texts, lists, dicts, arrays and tensors can "
            "be read, and objects of other classes never"
        ) from error


AsBytes = Callable[[object], bytes]


def check_readable(key: str, value: object, as_bytes: AsBytes, octets: bytes | None = None) -> None:
    """`UnreadableValueError` if a restore would refuse this value."""
    if is_plain(value):
        return
    try:
        octets = as_bytes(value) if octets is None else octets
    except Exception as error:
        raise UnreadableValueError(
            f"{key} is {_words(value)}, which torch.save refuses: {error}"
        ) from error
    cause: UnfitError | None = None
    try:
        read_value(octets, key)
    except UnfitError as error:
        cause = error
    if cause is not None or _is_of_second_hour(value):
        path, culprit = _culprit(key, value, as_bytes)
        raise UnreadableValueError(
            f"{path} is {_words(culprit)}, which no restore would read: {_remedy(culprit)}"
        ) from cause


def is_plain(value: object) -> bool:
    """Whether it consists of Python's own types, which a restore reads."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() < _LARGEST_BITS)  # type: ignore[attr-defined]
    if kind in _CONTAINERS:
        return all(map(is_plain, value))  # type: ignore[call-overload]
    if kind is dict:
        return all(is_plain(name) and is_plain(member) for name, member in value.items())  # type: ignore[attr-defined]
    if kind is torch.Tensor:
        return is_strided(value)  # type: ignore[arg-type]
    return kind in _PLAIN


def is_strided(tensor: torch.Tensor) -> bool:
    """Whether it is a plain strided tensor on a CPU or a GPU."""
    return bool(
        tensor.layout == torch.strided
        and tensor.device.type in ("cpu", "cuda")
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _is_of_second_hour(value: object) -> bool:
    """Whether a time has `fold` set, which torch's files lose."""
    return bool(getattr(value, "fold", 0)) or any(
        _is_of_second_hour(part) for _, part in _parts(value)
    )


def _culprit(key: str, value: object, as_bytes: AsBytes) -> tuple[str, object]:
    """The innermost part that a restore would refuse, and its key."""
    for name, part in _parts(value):
        try:
            check_readable(f"{key}[{name!r}]", part, as_bytes)
        except UnreadableValueError:
            return _culprit(f"{key}[{name!r}]", part, as_bytes)
    return key, value


def _parts(value: object) -> Iterator[tuple[object, object]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif type(value) in (list, tuple):
        yield from enumerate(value)  # type: ignore[arg-type]
    elif type(value) in (set, frozenset):
        yield from ((member, member) for member in value)  # type: ignore[attr-defined]


def _words(value: object) -> str:
    kind = type(value)
    named = (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"of class {named}"


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
        lambda value: bool(getattr(value, "fold", 0)),
        "save its timestamp(), as its fold would be lost",
    ),
    (
        lambda _: True,
        "save numbers, texts, lists, dicts, arrays and tensors instead, or an object with "
        "state_dict and load_state_dict at the top of the state",
    ),
)


@lru_cache(maxsize=2)
def _allowed(with_numpy: bool) -> list[Any]:
    """The allowed objects in torch's form: each with its name in the file."""
    allowed: list[Any] = []
    for named in sorted(DATA):
        module, _, name = named.rpartition(".")
        if module.startswith("numpy") and not with_numpy:
            continue
        allowed.append((getattr(_module(module), name), named))
    if with_numpy:
        allowed += _types_of_numpy()
    return allowed


def _module(name: str) -> Any:
    try:
        return importlib.import_module(_ELSEWHERE.get(name, name))
    except ModuleNotFoundError:
        return importlib.import_module(name)


def _types_of_numpy() -> list[Any]:
    """The classes of numpy's data types."""
    import numpy as np

    kinds: set[Any] = set(np.sctypeDict.values())
    return list({type(np.dtype(kind)) for kind in kinds})
