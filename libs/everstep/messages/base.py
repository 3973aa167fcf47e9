"""What all messages share: how they are tagged, encoded, and told apart."""

from datetime import datetime

import msgspec


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """Anything that crosses a process: immutable, its name and version in its tag.

    A released message only ever gains fields, each with a default. A changed meaning is
    a new class with a new tag.
    """


class Fact(Message, frozen=True, kw_only=True, omit_defaults=True):
    """An immutable, durable event.

    Its id is made once, with the decision that it records, and survives every retry: the
    stream and the tables know a second copy by it.
    """

    id: str
    job: str
    """The job that it is about, or `everstep.subjects.CLUSTER`."""
    at: datetime
    """The sender's wall clock, in UTC: shown to people, never compared."""
    source: str
    """Who says so: a service or agent, as `health` or `agent/node-07`."""
    round: int | None = None
    """The round that it belongs to, where there is one."""


def kind_of(message: Message | type[Message]) -> str:
    """The name without the version: `rank_exited` for `rank_exited.v1`."""
    return tag_of(message).rpartition(".")[0]


def tag_of(message: Message | type[Message]) -> str:
    """Name and version, as on the wire: `rank_exited.v1`."""
    tag = message.__struct_config__.tag
    assert isinstance(tag, str), f"{message!r} has no tag"
    return tag
