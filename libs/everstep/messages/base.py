"""What all messages share: how they are tagged, encoded, and told apart.

Releases N and N-1 run side by side, so an older reader must decode what a newer sender
says. Three rules follow:

- a message only ever gains fields, each with a default; unknown fields are ignored;
- a value from a set that may grow (a state, a cause, a mode) is a plain `str` whose
  docstring lists the known values. An enum or `Literal` would make the whole message
  undecodable for an older reader; a string leaves it to the reader, who treats a value
  that it does not know as the least harmful known one: never as a failure, never as an
  order;
- "not known" is None, or an empty string or tuple, and is not sent at all.

Floats are finite, and have bounds that `Message` and `Part` give to every field; times lie between
1970 and 3000. Text is valid Unicode without NUL: decode foreign bytes with `errors="replace"`.
"""

from datetime import datetime, timedelta
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import msgspec

Time = Annotated[datetime, msgspec.Meta(tz=True)]
"""A wall clock reading with its zone, UTC by convention: shown to people, never compared."""
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""A whole number that every reader and database can hold; a longer one is refused."""
RoundNumber = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**52)]
"""A round that an agent claims to know: the rounds after it are a `Count`, too."""
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
"""A number of something, or its place among others, which no reader must round."""
NAME_CHARACTERS = 512
Name = Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS)]
"""An id, a name, or a word from a list; a longer one is refused. Free text has another type."""

_SECONDS = Annotated[float, msgspec.Meta(ge=-1e10, le=1e10)]
_FLOAT = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


def _bounded(name: str, hint: Any) -> Any:
    """The type of a field, with bounds: a time plus or minus any seconds is still a time."""
    if hint is float:
        return _SECONDS if name.endswith("_s") else _FLOAT
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None or origin is Annotated:
        return hint
    bounded = tuple(_bounded(name, argument) for argument in arguments)
    return Union[bounded] if origin in {Union, UnionType} else origin[bounded]  # noqa: UP007


def earlier(at: Time, seconds: float) -> Time:
    """The time that long before; `seconds` is within the bounds of a message's field."""
    return at - timedelta(seconds=seconds)


def shared(kind: type[msgspec.Struct], source: object) -> dict[str, Any]:
    """The fields of a kind of message or part that the source has under the same names."""
    names = kind.__struct_fields__
    return {name: getattr(source, name) for name in names if hasattr(source, name)}


class _Bounded(msgspec.Struct, frozen=True):
    """Its fields have bounds, which msgspec checks when it decodes."""

    def __init_subclass__(cls) -> None:
        for name, hint in list(cls.__annotations__.items()):
            cls.__annotations__[name] = _bounded(name, hint)


class Message(_Bounded, frozen=True, kw_only=True, omit_defaults=True, tag_field="type", gc=False):
    """Anything that crosses a process: immutable, its name and version in its tag.

    A released message only ever gains fields, each with a default. A changed meaning is
    a new class with a new tag. What is decoded holds no cycles: the garbage collector need
    not visit it, and a service that keeps a beat of each node does not pay for them.
    """


class Part(_Bounded, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """A piece of a message: immutable, without a tag, never sent alone."""


class Fact(Message, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable, durable event.

    Its id is made once, with the decision that the fact records, and survives every retry: the
    stream and the tables recognize a second copy by the id.
    """

    id: Name
    """32 hex digits, unique for ever."""
    job: Name
    """The job that the fact is about, or `everstep.subjects.CLUSTER`."""
    at: Time
    """The sender's wall clock, in UTC: shown to people, never compared."""
    source: Name
    """The sender: a service or an agent, as `health` or `agent/node-07`."""
    round: Count | None = None
    """The round that the fact belongs to, where there is one."""


class RoundFact(Fact, frozen=True, kw_only=True):
    """A fact that means nothing outside its round: the round is required, and fences it."""

    round: Count
    """The round that the fact belongs to."""


class Order(Message, frozen=True, kw_only=True):
    """An instruction to an agent, which follows it once, and only while the round is the newest.

    Orders travel without storage: an agent that may have missed one reads the round's
    document again.
    """

    id: Name
    """32 hex digits; an agent that has carried it out ignores a second copy."""
    job: Name
    """The job whose ranks the order concerns."""
    round: RoundNumber
    """The fencing token: an order for an older round than the agent's is refused."""
    reason: str
    """Why, in words that the agent logs and an operator reads."""


class Question(Message, frozen=True, kw_only=True):
    """A question to a service on `es.ask`; `questions.ASKS` lists what each service answers."""

    job: Name
    """The job on whose behalf somebody asks, or `everstep.subjects.CLUSTER`."""


class Reply(Message, frozen=True, kw_only=True):
    """The answer to a question. What cannot be answered is a named error instead."""


class DocumentBody(Message, frozen=True, kw_only=True):
    """What a key of a bucket holds: replaced as a whole, by compare-and-set."""


class BlobRef(Part, frozen=True, kw_only=True):
    """Where a blob of evidence is, and the hash that its bytes must have."""

    job: Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
    """The job that the blob belongs to: part of a subject, and of an address."""
    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """The xxh3-128 of the bytes as stored, which is also the blob's name: a blob never changes."""
    size_bytes: Count
    """The size of the content, before compression."""
    parts: Count
    """How many messages of the stream hold the blob."""


def kind_of(message: Message | type[Message]) -> str:
    """The name without the version: `rank_exited` for `rank_exited.v1`."""
    return tag_of(message).rpartition(".")[0]


def tag_of(message: Message | type[Message]) -> str:
    """Name and version, as on the wire: `rank_exited.v1`."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), f"{message!r} has no tag"
    return tag
