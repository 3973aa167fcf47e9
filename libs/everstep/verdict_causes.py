"""The areas that a verdict can name as the cause of an incident, and what it can advise.

The words are those of `verdict_reached.cause`, which stay open on the wire. To add a cause, add a
member to `VerdictCause` and a row to `meaning_of`: mypy reports every place that must know it.
"""

from dataclasses import dataclass
from typing import Literal, assert_never, get_args

VerdictCause = Literal[
    "user_code", "configuration", "data", "framework", "gpu", "host", "network", "storage",
    "scheduler", "injected", "unknown",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictCauseMeaning:
    """What follows from one cause."""

    may_be_of_node: bool = False
    """It may be a node's fault, so a verdict may name nodes."""
    is_deterministic: bool = False
    """The same run fails in the same way, unless somebody changes it."""


def meaning_of(cause: VerdictCause) -> VerdictCauseMeaning:
    """What follows from a cause."""
    match cause:
        case "user_code" | "configuration" | "data":
            return VerdictCauseMeaning(is_deterministic=True)
        case "gpu" | "host" | "network" | "storage":
            return VerdictCauseMeaning(may_be_of_node=True)
        case "framework" | "scheduler" | "injected" | "unknown":
            return VerdictCauseMeaning()
        case _:
            assert_never(cause)


VERDICT_CAUSES: tuple[VerdictCause, ...] = get_args(VerdictCause)
NODE_CAUSES = frozenset(cause for cause in VERDICT_CAUSES if meaning_of(cause).may_be_of_node)
DETERMINISTIC_CAUSES = frozenset(
    cause for cause in VERDICT_CAUSES if meaning_of(cause).is_deterministic
)

Advice = Literal["restart", "restart_without", "stop", "wait", "inform"]

_ADVICE: dict[str, str] = {
    "restart": "restart: the same run may succeed",
    "restart_without": "restart without the nodes named above",
    "stop": "stop: it will come again until something is changed",
    "wait": "wait until nodes or the quota are back",
    "inform": "a person must act first, or it comes again",
}
_REQUESTED = "stop: somebody requested its end"


def advice_text(advice: str, cause: str | None) -> str:
    """What a verdict advises, in words; what a newer release advises, as it is."""
    if advice == "stop" and cause == "scheduler":
        return _REQUESTED
    return _ADVICE.get(advice, advice)
