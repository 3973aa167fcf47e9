"""The first sentence about an incident: the verdict's where it names others than the first report.

The rank that raises first is often a victim: its connection was closed by the rank that failed
without a word. Pure.
"""

import re
from collections.abc import Collection

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
