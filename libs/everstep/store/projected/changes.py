"""Changes to projected tables, merged so that order, batching and repetition do not matter.

A fact changes some columns of some rows. How two changes of one column become one is the
column's rule, and every rule is associative and commutative. So a batch can be merged here,
and then into the tables by one statement each, with the same result as one by one.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

from everstep.messages import Fact

Value = str | int | float | bool | None
Key = tuple[str | int, ...]
Type = Literal["text", "json", "int", "float", "bool"]


class LoggedFact(NamedTuple):
    """One fact of the log."""

    n: int
    """Its place in the log."""
    received_us: int
    fact: Fact


class MergeRule(Enum):
    """How two values of one column become one. An absent (None) value never wins."""

    LEAST = "least"
    GREATEST = "greatest"
    SUM = "sum"
    FOLLOW = "follow"
    """The value that came with the greatest value of another column, its leader."""


@dataclass(frozen=True, slots=True)
class Column:
    """One projected column: what it holds, and its rule."""

    type: Type
    rule: MergeRule = MergeRule.GREATEST
    leader: str | None = None


class ColumnNames(TypedDict, total=False):
    """The names of columns, with spaces between them, by what the columns hold."""

    text: str
    json: str
    int: str
    float: str
    bool: str


def least(**names: Unpack[ColumnNames]) -> dict[str, Column]:
    """Columns that keep their smallest values."""
    return _columns(names, MergeRule.LEAST)


def greatest(**names: Unpack[ColumnNames]) -> dict[str, Column]:
    """Columns that keep their greatest values."""
    return _columns(names, MergeRule.GREATEST)


once = greatest
"""Columns that only one fact sets: two values meet only if that fact is repeated."""


def total(names: str) -> dict[str, Column]:
    """Counters: values add."""
    return _columns({"int": names}, MergeRule.SUM)


def led_by(leader: str, **names: Unpack[ColumnNames]) -> dict[str, Column]:
    """A leader, which keeps its greatest value, and the columns that change when it grows."""
    led = _columns(names, MergeRule.FOLLOW, leader)
    return {**led, leader: Column(led[leader].type)}


def _columns(names: ColumnNames, rule: MergeRule, leader: str | None = None) -> dict[str, Column]:
    of_types: Any = names.items()
    return {name: Column(of, rule, leader) for of, text in of_types for name in text.split()}


@dataclass(frozen=True, eq=False)
class ProjectedTable:
    """A projected table: its key, and each other column."""

    name: str
    key: Mapping[str, Type]
    columns: Mapping[str, Column]
    followers: Mapping[str, tuple[str, ...]] = field(init=False)
    """By leader."""
    rules: Mapping[str, MergeRule] = field(init=False)
    """By column, except followers: their leader has them."""

    def __post_init__(self) -> None:
        followers: dict[str, tuple[str, ...]] = {}
        for name, column in self.columns.items():
            if column.leader is not None:
                followers[column.leader] = (*followers.get(column.leader, ()), name)
        rules = {n: c.rule for n, c in self.columns.items() if c.rule is not MergeRule.FOLLOW}
        object.__setattr__(self, "followers", followers)
        object.__setattr__(self, "rules", rules)


class Changes:
    """The changes by a batch of facts: at most one row for each table and key."""

    def __init__(self) -> None:
        self._tables: dict[ProjectedTable, dict[Key, dict[str, Value]]] = {}

    def __iter__(self) -> Iterator[tuple[ProjectedTable, Mapping[Key, Mapping[str, Value]]]]:
        return iter(self._tables.items())

    def merge(self, shape: ProjectedTable, key: Key, /, **values: Value) -> None:
        """Change one row. A leader comes with all its followers, and they only with it."""
        rows = self._tables.get(shape)
        if rows is None:
            rows = self._tables[shape] = {}
        row = rows.get(key)
        if row is None:
            rows[key] = values
        else:
            merge_row(shape, row, values)


def merge_row(shape: ProjectedTable, row: dict[str, Value], new: Mapping[str, Value]) -> None:
    """Merge `new` into `row`, as the database would."""
    rules, followers = shape.rules, shape.followers
    for name, value in new.items():
        rule = rules.get(name)
        if rule is None or value is None:
            row.setdefault(name, None)
            continue
        old: Any = row.get(name)
        if rule is MergeRule.SUM:
            row[name] = value if old is None else old + value
        elif old is None or (value > old if rule is MergeRule.GREATEST else value < old):
            row[name] = value
            if name in followers:
                for follower in followers[name]:
                    row[follower] = new.get(follower)


def compact(value: object) -> str:
    """A small structure as the text of a column: equal structures are equal texts."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True)
