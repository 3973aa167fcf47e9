"""What all answers of REST share, how a row becomes one, and the headline of an incident.

The headline is the verdict's where it names others than the first report: the rank that raises
first is often a victim, whose connection was closed by the rank that failed without a word.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

import msgspec
from pydantic import ConfigDict, Field

from everstep.store.projected.registry import PROJECTED
from everstep.store.times import from_us
from everstep_services.history.api.http.parameters import DescribedModel

_NAMED_MOST = 6
_BEFORE_RANK = r"\branks? \(?(?:\d[\d, -]*(?:and )?)?(?<!\d)"
_BEFORE_NODE = r"(?<![\w.-])"


def names_others(
    ranks: Collection[int],
    nodes: Collection[str],
    reported_rank: int | None,
    reported_node: str | None,
) -> bool:
    """Whether the culprits of a verdict are not exactly those that the first report is about.

    A verdict without culprits says that the reported rank or node is none.
    """
    if not ranks and not nodes:
        return reported_rank is not None or reported_node is not None
    is_node_named = reported_node is not None and reported_node in nodes
    if not ranks:
        return bool(nodes) and not is_node_named
    if reported_rank is None:
        return not is_node_named
    return set(ranks) != {reported_rank}


def culprit_sentence(
    reason: str, ranks: Collection[int], nodes: Collection[str], most: int = _NAMED_MOST
) -> str:
    """The reason of a verdict; the culprits come first where it does not name one of them."""
    texts = [str(rank) for rank in sorted(ranks)] or sorted(nodes)
    if not texts or (ranks and "every rank" in reason):
        return reason
    before = _BEFORE_RANK if ranks else _BEFORE_NODE
    if any(re.search(rf"{before}{re.escape(text)}(?![\w.-]*\w)", reason) for text in texts):
        return reason
    noun = f"{'rank' if ranks else 'node'}{'' if len(texts) == 1 else 's'}"
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{noun} {', '.join(texts[:most])}{more}: {reason}"


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


class Answer(DescribedModel):
    """The root of all answers."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class PageOf(Answer, Generic[T]):
    """Some of the items of a list."""

    items: list[T]
    next: str | None = Field(description="The `cursor` of the next page; null at the end.")
