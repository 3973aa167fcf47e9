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

Retry = Literal["as_is", "without_node", "after_change", "never", "unknown"]
"""Whether another attempt may succeed: as it is, on other nodes, once somebody has changed
something, or not at all, because somebody requested the end."""
RETRIES: tuple[Retry, ...] = get_args(Retry)
_RETRY_OF_KIND: dict[str, Retry] = {
    **dict.fromkeys(
        ("preempted", "time_limit", "unschedulable", "port_taken", "rendezvous", "peer_lost"),
        "as_is",
    ),
    **dict.fromkeys(
        ("gpu_ecc", "gpu_fault", "nvlink", "silent_corruption", "host_hardware", "kernel_fault",
         "node_failed", "illegal_instruction"),
        "without_node",
    ),
    **dict.fromkeys(
        ("host_oom", "gpu_oom", "bus_error", "resource_limit", "disk_full", "quota", "permission",
         "missing_file", "corrupt_file", "cuda_driver", "compile_error", "absurd_size"),
        "after_change",
    ),
    **dict.fromkeys(("operator", "cancelled"), "never"),
    **dict.fromkeys(("killed", "exited", "aborted", "segfault", "hang", "nccl_error"), "unknown"),
}  # fmt: skip
"""By the kind of failure, where that tells more than the cause."""


def retry_of(
    cause: VerdictCause, kind: str, *, has_nodes: bool = False, is_transient: bool | None = None
) -> Retry:
    """Whether another attempt may succeed after a failure of this cause and kind."""
    if is_transient is True:
        return "as_is"
    if meaning_of(cause).is_deterministic:
        return "after_change"
    if kind in _RETRY_OF_KIND and (cause, kind) != ("unknown", "bus_error"):  # it may be sent, too
        return _RETRY_OF_KIND[kind]
    if not meaning_of(cause).may_be_of_node:
        return "as_is" if cause == "injected" else "unknown"
    if has_nodes:
        return "without_node"
    return "after_change" if is_transient is False else "as_is"


Advice = Literal[
    "restart", "restart_without", "restart_elsewhere", "change", "stop", "wait", "inform"
]  # fmt: skip

_ADVICE: dict[str, str] = {
    "restart": "restart: the same run may succeed",
    "restart_without": "restart without the nodes named above",
    "restart_elsewhere": "restart on other nodes: the evidence names none to leave out",
    "change": "change something first: a restart only shows whether it comes again",
    "stop": "stop: it will come again until something is changed",
    "wait": "wait until nodes or the quota are back",
    "inform": "a person must act first, or it comes again",
}
_ADVICE_RECOVERED: dict[str, str] = {
    "restart": "nothing to do: the training goes on",
    "restart_without": "leave out the nodes named above from now on: the training goes on",
    "restart_elsewhere": "other nodes if it comes again: the training goes on",
    "change": "change something, or it may come again: the training goes on",
    "stop": "change something, or it may come again: the training goes on",
    "wait": "nothing to wait for: the training goes on",
    "inform": "a person must act, or it may come again: the training goes on",
}
"""The same once the training is back: what would have brought it back is not needed any more."""
_RETRY: dict[str, str] = {
    "as_is": "as it is",
    "without_node": "without the node",
    "after_change": "after a change only",
    "never": "not at all",
    "unknown": "nobody knows whether it helps",
}
_REQUESTED = "stop: somebody requested its end"


def advice_text(advice: str, cause: str | None, outcome: str | None = None) -> str:
    """What a verdict advises, in words; what a newer release advises, as it is.

    `outcome` is that of the incident; None while it is open.
    """
    is_back = outcome == "recovered"
    if advice == "stop" and cause == "scheduler":
        return _ADVICE_RECOVERED["restart"] if is_back else _REQUESTED
    if is_back and advice in _ADVICE_RECOVERED:
        return _ADVICE_RECOVERED[advice]
    return _ADVICE.get(advice, advice)


def retry_text(retry: str) -> str:
    """Whether another attempt may succeed, in words; what a newer release says, as it is."""
    return _RETRY.get(retry, retry)
