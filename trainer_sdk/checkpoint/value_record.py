"""Writes and reads the record of a value: a flat list of plain items and operations."""

from collections.abc import Sequence
from typing import Any

from msgspec.msgpack import Ext

from trainer_sdk.checkpoint.storage.pickle_data import (
    MOST_DEPTH,
    ReadBudget,
    UnreadableBytesError,
    short,
)
from trainer_sdk.checkpoint.storage.value_archive import BYTES, Item, Made
from trainer_sdk.checkpoint.value_kinds import CONTAINERS, KINDS, kind_of

_LEAST_INT, _MOST_INT = -(2**63), 2**64
_LARGEST_BITS = 2040
_NUMBERS = frozenset({int, float, bool, type(None)})


class RefusedValueError(Exception):
    """A value that no restore would read."""

    def __init__(self, value: object) -> None:
        super().__init__(value)
        self.value = value
        self.path = ""
        """Where it is in the whole value, as `[0]['a']`."""


def record_of(value: object) -> list[Item]:
    """The items that make the value; `RefusedValueError` if there are none."""
    items: list[Item] = []
    _put(value, items, 0)
    return items


def value_of(items: Sequence[Item], octets: bytes, budget: ReadBudget) -> Any:
    """The value that the items make; `octets` is the archive to which they may refer."""
    stack: list[Any] = []
    depths: list[int] = []
    for item in items:
        budget.spend(1)
        depth = 0
        if type(item) is Made:
            begin = len(stack) - item.count
            if not 0 <= begin <= len(stack):
                raise UnreadableBytesError("an operation has less parts than it counts")
            depth = max(depths[begin:], default=0) + 1
            if depth > MOST_DEPTH:
                raise UnreadableBytesError(f"its parts are nested more than {MOST_DEPTH} deep")
            made = _made(item.kind, stack[begin:], octets, budget)
            del stack[begin:], depths[begin:]
        else:
            made = item
            if type(item) is Ext:
                made = bytes(item.data) if item.code == BYTES else None
        stack.append(made)
        depths.append(depth)
    if len(stack) != 1:
        raise UnreadableBytesError(f"its record makes {len(stack)} values")
    return stack[0]


def filled(kind: str, parts: Sequence[Any], budget: ReadBudget) -> Any:
    """A container of these parts. Keys may be made to collide, so each of them is counted."""
    if kind in ("list", "tuple"):
        return CONTAINERS[kind](parts)
    if kind in ("set", "frozenset"):
        members = set()
        for part in parts:
            budget.spend(1)
            members.add(part)
        return CONTAINERS[kind](members)
    mapping = CONTAINERS[kind]()
    for at in range(0, len(parts), 2):
        budget.spend(1)
        mapping[parts[at]] = parts[at + 1]
    return mapping


def _made(kind: str, parts: list[Any], octets: bytes, budget: ReadBudget) -> Any:
    try:
        if kind == "stored":
            begin, length = parts
            return _stored(begin, length, octets, budget)
        if kind in CONTAINERS:
            return filled(kind, parts, budget)
        return KINDS[kind].make(*parts)
    except UnreadableBytesError:
        raise
    except KeyError as error:
        raise UnreadableBytesError(f"it is, or has in it, {short(kind)}") from error
    except Exception as error:
        raise UnreadableBytesError(f"{kind} cannot be made: {short(error)}") from error


def _stored(begin: int, length: int, octets: bytes, budget: ReadBudget) -> bytes:
    if not 0 <= begin <= begin + length <= len(octets):
        raise UnreadableBytesError("it refers to bytes outside of itself")
    budget.copy(length)
    return octets[begin : begin + length]


def _put(value: Any, items: list[Item], depth: int) -> None:
    kind = type(value)
    if kind in (float, bool, type(None)) or (kind is int and _LEAST_INT <= value < _MOST_INT):
        items.append(value)
    elif kind is bytes:
        items.append(Ext(BYTES, value))
    elif kind is str and _is_unicode(value):
        items.append(value)
    else:
        _put_made(value, items, depth + 1)


def _put_made(value: Any, items: list[Item], depth: int) -> None:
    name = kind_of(value)
    is_huge = type(value) is int and value.bit_length() >= _LARGEST_BITS
    if not name or is_huge or depth > MOST_DEPTH:
        raise RefusedValueError(value)
    if name in CONTAINERS:
        _put_container(name, value, items, depth)
        return
    try:
        parts = KINDS[name].parts(value)
        for part in parts:
            _put(part, items, depth)
    except Exception as error:
        raise RefusedValueError(value) from error
    items.append(Made(name, len(parts)))


def _put_container(name: str, value: Any, items: list[Item], depth: int) -> None:
    if isinstance(value, dict):
        for key, member in value.items():
            _put_member(key, key, items, depth)
            _put_member(key, member, items, depth)
        items.append(Made(name, 2 * len(value)))
        return
    kinds = set(map(type, value))
    if kinds <= _NUMBERS and all(
        _LEAST_INT <= part < _MOST_INT for part in value if type(part) is int
    ):
        items.extend(value)
    else:
        for number, part in enumerate(value):
            is_ordered = isinstance(value, (list, tuple))
            _put_member(number if is_ordered else part, part, items, depth)
    items.append(Made(name, len(value)))


def _put_member(name: object, member: object, items: list[Item], depth: int) -> None:
    try:
        _put(member, items, depth)
    except RefusedValueError as error:
        error.path = f"[{name!r}]{error.path}"
        raise


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
