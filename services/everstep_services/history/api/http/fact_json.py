"""Facts as JSON, with their bodies unchanged."""

from collections.abc import Iterable, Sequence
from datetime import datetime

import msgspec

from everstep.store.queries import Record
from everstep.store.times import from_us


class _Fact(msgspec.Struct):
    """The same fields as `dto.FactOut`, which describes them."""

    n: int
    id: str
    job: str
    kind: str
    round: int | None
    node: str | None
    at: datetime
    source: str
    received_at: datetime
    body: msgspec.Raw


class _Page(msgspec.Struct):
    items: list[_Fact]
    next: str | None


def fact_json(row: Record) -> bytes:
    """One fact."""
    return msgspec.json.encode(_fact(row))


def fact_line(row: Record) -> bytes:
    """One fact without line breaks, which its sender may have put between its fields."""
    data = fact_json(row)
    return msgspec.json.format(data, indent=-1) if b"\n" in data or b"\r" in data else data


def facts_json(rows: Sequence[Record], next_: str | None) -> bytes:
    """A page of facts."""
    return msgspec.json.encode(_Page([_fact(row) for row in rows], next_))


def check_bodies(rows: Iterable[Record]) -> None:
    """Raise `msgspec.MsgspecError` for a body that is not a JSON object.

    The log holds none, but a bundle is a file from elsewhere.
    """
    for row in rows:
        msgspec.json.decode(row["body"], type=dict[str, msgspec.Raw])


def _fact(row: Record) -> _Fact:
    return _Fact(
        row["n"],
        row["id"],
        row["job"],
        row["kind"],
        row["round"],
        row["node"],
        from_us(row["at_us"]),
        row["source"],
        from_us(row["received_us"]),
        msgspec.Raw(row["body"]),
    )
