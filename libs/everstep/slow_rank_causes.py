"""Why a rank can be slow, and all that follows from each cause: the one table of these causes.

The words are those of `straggler_found.cause`, which stay open on the wire; `known_slow_rank_cause`
closes the set. To add a cause, add a member to `SlowRankCause` and a row to `meaning_of`: mypy
reports every place that must know it.
"""

from dataclasses import dataclass
from typing import Literal, TypeGuard, assert_never, get_args

SlowRankCause = Literal[
    "input", "compute", "host", "network", "device", "design", "injected", "unknown"
]
Help = Literal["replace", "watch", "tune"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankMeaning:
    """What follows from one cause."""

    helps: Help
    """What would help, as `straggler_found.failure_class` has it."""
    is_curable: bool = False
    """Another start or another node may mend it."""
    is_of_node: bool = False
    """It speaks against the node. `compute` and `unknown` may be the script's own work."""


def meaning_of(cause: SlowRankCause) -> SlowRankMeaning:
    """What follows from a cause."""
    match cause:
        case "host" | "device" | "network":
            return SlowRankMeaning(helps="replace", is_curable=True, is_of_node=True)
        case "compute" | "unknown":
            return SlowRankMeaning(helps="watch", is_curable=True)
        case "injected":  # it ends with the fault that somebody makes on purpose
            return SlowRankMeaning(helps="watch")
        case "input" | "design":  # they stay with the job
            return SlowRankMeaning(helps="tune")
        case _:
            assert_never(cause)


def is_slow_rank_cause(word: str) -> TypeGuard[SlowRankCause]:
    """Whether this release knows the word."""
    return word in get_args(SlowRankCause)


def known_slow_rank_cause(word: str) -> SlowRankCause:
    """The cause that a word of the wire names; `unknown` for a word of a newer release."""
    return word if is_slow_rank_cause(word) else "unknown"


_CURABLE_FIRST: tuple[SlowRankCause, ...] = (
    "host", "device", "network", "compute", "unknown", "input", "design", "injected",
)  # fmt: skip
CURABLE = tuple(cause for cause in _CURABLE_FIRST if meaning_of(cause).is_curable)
OF_NODE = tuple(cause for cause in _CURABLE_FIRST if meaning_of(cause).is_of_node)
