"""Copies the fields of facts into columns: a column has the name of the field that it holds.

In a group of columns that follow a leader, the leader's stem may stand before the field's name:
`committed_step`, which follows `committed_n`, is the field `step` of the fact. What has another
name, or must be computed, is given in words where the kind is projected.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import msgspec

from everstep.store.projected.changes import Changes, LoggedFact, ProjectedTable, Value, compact
from everstep.store.projected.nodes import NODES
from everstep.store.times import to_us

Projection = Callable[[Changes, LoggedFact, Any], None]
"""Adds the changes of one fact. The fact is passed once more, for its type."""
_Read = Callable[[LoggedFact, Any], Value]


def copied(
    shape: ProjectedTable, leader: str = "", *, prefix: str = "", **constants: Value
) -> Projection:
    """The projection of a kind that sets one group of columns, and these others to constants."""

    def project(changes: Changes, entry: LoggedFact, _fact: Any) -> None:
        values = fields_of(entry, shape, leader, prefix)
        changes.merge(shape, key_of(shape, entry), **values, **constants)

    return project


def key_of(shape: ProjectedTable, entry: LoggedFact) -> tuple[str | int, ...]:
    """The row of the table that a fact is about: a key without a field of its own is its id."""
    fact = entry.fact
    return tuple(entry.n if name == "n" else getattr(fact, name, fact.id) for name in shape.key)


def fields_of(
    entry: LoggedFact,
    shape: ProjectedTable,
    leader: str = "",
    prefix: str = "",
    part: msgspec.Struct | None = None,
    /,
    **others: Value,
) -> dict[str, Value]:
    """The columns of a leader, or those that follow none, from the fields of a fact or its part.

    `others` has the columns whose value is not a field as it is.
    """
    source = entry.fact if part is None else part
    values: dict[str, Value] = {
        name: read(entry, source) for name, read in _reads(shape, leader, prefix, type(source))
    }
    values.update(others)
    return values


@cache
def _reads(
    shape: ProjectedTable, leader: str, prefix: str, kind: type[msgspec.Struct]
) -> tuple[tuple[str, _Read], ...]:
    """How each column is read that the kind of fact or part has a field for."""
    columns = (leader, *shape.followers[leader]) if leader else shape.rules.keys()
    stems = [stem for stem in (prefix, f"{leader.rpartition('_')[0]}_") if stem != "_"]
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    reads: list[tuple[str, _Read]] = []
    for column in columns:
        if not leader and column in shape.followers:
            continue
        stemless = (column.removeprefix(stem) for stem in stems if column.startswith(stem))
        field = next((it for it in (column, *stemless) if it in fields or it in _OF_ALL), None)
        if field is None:
            if leader:  # it comes with all its followers
                reads.append((column, lambda *_: None))
        elif field in _OF_ALL:
            reads.append((column, _OF_ALL[field]))
        else:
            is_json, default = shape.columns[column].type == "json", fields[field].default
            reads.append((column, _field(field, is_json=is_json, is_empty=default == "")))
    return tuple(reads)


def _field(name: str, *, is_json: bool, is_empty: bool) -> _Read:
    """How a column is read from a field, whose empty text may stand for no value."""
    if is_json:
        return lambda _, source: json_text(getattr(source, name))
    if is_empty:
        return lambda _, source: getattr(source, name) or None
    return lambda _, source: getattr(source, name)


_OF_ALL: Mapping[str, _Read] = {
    "n": lambda entry, _: entry.n,
    "fact": lambda entry, _: entry.fact.id,
    "us": lambda entry, _: to_us(entry.fact.at),
    "at_us": lambda entry, _: to_us(entry.fact.at),
}
"""What every fact has: its place, its id, its time."""


def update_node(changes: Changes, entry: LoggedFact, node: str, **values: Value) -> None:
    """Change a node's row, and note the fact in it."""
    changes.merge(
        NODES, (node,), first_n=entry.n, last_n=entry.n, updated_us=entry.received_us, **values
    )


def json_text(value: Any) -> str | None:
    """A field as the text of a column, its parts as objects; `BlobRef` decodes one of a blob."""
    match value:
        case None:
            return None
        case tuple() | list():
            return compact([_builtin(item) for item in value])
        case Mapping():
            return compact(dict(value))
        case _:
            return compact(_builtin(value))


def _builtin(value: Any) -> Any:
    return msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else value
