"""Messages to bytes and back: whatever the bytes are, a message or a `BadMessageError`."""

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeAlias, TypeVar, Union, get_args, get_type_hints

import msgspec

from everstep.errors import EverstepError
from everstep.messages.base import Count, Fact, Message, Name, Part, Time, tag_of
from everstep.messages.registry import MESSAGE_TYPES

MAX_MESSAGE_BYTES = 1024 * 1024
"""The largest message that is sent or read: what a NATS server takes by default."""
SHOWN_BYTES = 80
"""How much of a bad message its error shows."""

AnyMessage: TypeAlias = Message
"""One of `MESSAGE_TYPES`. Match on the classes that you know, and pass over the rest."""
M = TypeVar("M", bound=Message)
T = TypeVar("T")

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=UTC), datetime(3000, 1, 1, tzinfo=UTC)
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")
"""A NUL in JSON; not the six characters of its escape, whose own backslash is escaped."""

_TAGS = frozenset(tag_of(message) for message in MESSAGE_TYPES)
_ENCODER = msgspec.json.Encoder()
_DECODER: msgspec.json.Decoder[AnyMessage] = msgspec.json.Decoder(Union[MESSAGE_TYPES])  # noqa: UP007  built from a tuple


class BadMessageError(EverstepError):
    """Bytes that are not a message of ours, or a message that cannot be encoded."""

    def __init__(self, problem: str, data: bytes = b"") -> None:
        shown = f"; first bytes: {data[:SHOWN_BYTES]!r}" if data else ""
        super().__init__(f"not a message: {problem}{shown}")
        self.first_bytes = bytes(data[:SHOWN_BYTES])


class UnknownMessageError(BadMessageError):
    """A message whose type this release does not know: its sender is newer, and right."""

    def __init__(self, tag: str, data: bytes) -> None:
        super().__init__(
            f"its type {tag[:SHOWN_BYTES]!r} is from another release; upgrade to read it", data
        )
        self.tag = tag


class EncodingTooLargeError(BadMessageError):
    """A message past `MAX_MESSAGE_BYTES`. What is that large belongs into a blob."""

    def __init__(self, subject: str, size_bytes: int, data: bytes) -> None:
        super().__init__(
            f"{subject} has {size_bytes} bytes, and {MAX_MESSAGE_BYTES} is the limit: "
            f"keep large content in a blob and refer to it",
            data,
        )
        self.size_bytes = size_bytes


class Envelope(Part, frozen=True, kw_only=True):
    """What every fact has, whichever release wrote it."""

    type: Name
    """Name and version; the kind is what stands before the last dot."""
    id: Name
    job: Name
    at: Time
    source: Name
    round: Count | None = None


_ENVELOPE = msgspec.json.Decoder(Envelope)


class _Tagged(msgspec.Struct, frozen=True):
    type: str


def encode(message: Message) -> bytes:
    """The message as JSON; `BadMessageError` for a value that no reader could decode.

    A NUL in a text, for instance in a line that a rank printed, becomes U+FFFD.
    """
    try:
        data = _ENCODER.encode(message)
    except (msgspec.EncodeError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise BadMessageError(f"{tag_of(message)} cannot be encoded: {error}") from error
    # JSON has no NaN: msgspec writes null, which no float field takes. Searching for the
    # word is ten times cheaper than looking at every value, and it is almost never there.
    if b"null" in data:
        _refuse_non_finite(message)
    if rb"\u0000" in data:
        data = _NUL.sub(rb"\1\\ufffd", data)
    if len(data) > MAX_MESSAGE_BYTES:
        raise EncodingTooLargeError(tag_of(message), len(data), data)
    return data


def decode(data: bytes) -> AnyMessage:
    """The message, of whichever known type; fields that this release lacks are ignored."""
    return _decoded(_DECODER, data)


def decode_as(data: bytes, of: type[M]) -> M:
    """The message, which must be of this type."""
    decoder: msgspec.json.Decoder[M] = _decoder_of(of)
    return _decoded(decoder, data)


def fact_in(body: str) -> Fact | None:
    """The fact that was stored as this text; None if this release cannot read it."""
    try:
        message = decode(body.encode())
    except BadMessageError:
        return None
    return message if isinstance(message, Fact) else None


def envelope(data: bytes) -> Envelope:
    """What every fact has, of one whose type may be from the future."""
    return _decoded(_ENVELOPE, data)


def _decoded(decoder: msgspec.json.Decoder[T], data: bytes) -> T:
    if len(data) > MAX_MESSAGE_BYTES:
        raise EncodingTooLargeError("it", len(data), data)
    if b"\\" in data and rb"\u0000" in data and _NUL.search(data):
        raise BadMessageError("it has a NUL in a text", data)
    try:
        decoded = decoder.decode(data)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:
        _refuse_unknown(data)
        raise BadMessageError(str(error), data) from error
    except RecursionError as error:
        raise BadMessageError("it is nested too deeply", data) from error
    if isinstance(decoded, msgspec.Struct):
        _refuse_far_times(decoded, data)
    return decoded


def _refuse_far_times(value: msgspec.Struct, data: bytes) -> None:
    """Raise `BadMessageError` for a time that a zone or a span could move out of the calendar."""
    for name in fields_with(type(value), datetime):
        waiting: list[object] = [getattr(value, name)]
        while waiting:
            item = waiting.pop()
            if isinstance(item, datetime):
                if not _FIRST <= item < _LAST:
                    raise BadMessageError(f"{name} is {item}, not between 1970 and 3000", data)
            elif isinstance(item, Mapping):
                waiting += item.values()
            elif isinstance(item, tuple):
                waiting += item
            elif isinstance(item, msgspec.Struct):
                _refuse_far_times(item, data)


@cache
def fields_with(of: type[msgspec.Struct], *types: Any) -> tuple[str, ...]:
    """The fields of a message or a part that hold one of these types, also deep inside."""
    return tuple(name for name, hint in get_type_hints(of).items() if _has(hint, types))


def _has(hint: Any, types: tuple[Any, ...]) -> bool:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return bool(fields_with(hint, *types))
    return hint in types or any(_has(argument, types) for argument in get_args(hint))


def _refuse_unknown(data: bytes) -> None:
    """`UnknownMessageError` if the only thing wrong may be that the sender is newer."""
    try:
        tag = _decoder_of(_Tagged).decode(data).type
    except (msgspec.DecodeError, ValueError, RecursionError):
        return
    if tag not in _TAGS:
        raise UnknownMessageError(tag, data)


def _refuse_non_finite(message: Message) -> None:
    names = fields_with(type(message), float, object, Any)
    waiting: list[object] = [msgspec.to_builtins(getattr(message, name)) for name in names]
    while waiting:
        value = waiting.pop()
        if isinstance(value, float) and not math.isfinite(value):
            raise BadMessageError(f"{tag_of(message)} has a float that is {value}: {message!r}")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list | tuple):
            waiting += value


@cache
def _decoder_of(of: type[T]) -> msgspec.json.Decoder[T]:
    return msgspec.json.Decoder(of)
