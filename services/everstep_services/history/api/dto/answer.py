"""What all answers of REST share, and how a row becomes one."""

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import BaseModel, ConfigDict, Field

from everstep.store.projected.registry import PROJECTED
from everstep.store.times import from_us
from everstep_services.history.headline import culprit_sentence, names_others

T = TypeVar("T")

_STRUCTURED = frozenset(
    name for shape in PROJECTED for name, column in shape.columns.items() if column.type == "json"
)


def present(row: Mapping[Any, Any]) -> dict[str, Any]:
    """A row as a DTO takes it: moments for `_us`, structures for their texts."""
    shown: dict[str, Any] = {}
    for name, value in row.items():
        if name == "at_us":
            shown["at"] = from_us(value)
        elif name.endswith("_us"):
            shown[f"{name[:-3]}_at"] = None if value is None else from_us(value)
        elif name in _STRUCTURED and value is not None:
            shown[name] = msgspec.json.decode(value)
        else:
            shown[name] = value
    return shown


def culprit_headline(
    shown: Mapping[str, Any], reported_rank: int | None, reported_node: str | None
) -> str | None:
    """What the verdict says of its culprits; None if the report has named just those.

    `shown` has the columns of a verdict, or none of them where there is no verdict.
    """
    ranks, nodes = shown["culprit_ranks"] or (), shown["culprit_nodes"] or ()
    reason = shown["verdict_reason"]
    if not reason or shown["is_inconclusive"]:
        return None
    if not names_others(ranks, nodes, reported_rank, reported_node):
        return None
    return culprit_sentence(reason, ranks, nodes)


def with_injection(shown: Mapping[str, Any], told: str | None) -> str | None:
    """The words of a report, after who injected the fault, where only the verdict knows that."""
    is_injected = shown["cause"] == "injected" and not shown["is_inconclusive"]
    is_told = not told or shown["injected_by"]
    return f"{shown['verdict_reason']}; {told}" if is_injected and not is_told else told


class Answer(BaseModel):
    """The root of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class PageOf(Answer, Generic[T]):
    """Some of the items of a list."""

    items: list[T]
    next: str | None = Field(description="The `cursor` of the next page; null at the end.")
