"""How a rank takes a signal, as its process and its page show it from outside."""

import signal

from everstep_services.agent.ranks import process_tree
from trainer_sdk import layout
from trainer_sdk.bootstrap.deferred_signals import DEFERRED

# A rank that has no handler for these would die of them, and nobody meant that.
ANNOUNCE = (signal.SIGUSR1, signal.SIGUSR2)
_WORDS = 8 * (layout.DEFERRED + 1)


def is_deferred(pid: int, number: int, page: str, *, is_armed_first: bool) -> bool:
    """Whether the rank has neither a handler of its own for this signal nor the default action.

    `is_armed_first`: it runs through the bootstrap, and has nothing of its own before its script.
    """
    if number not in DEFERRED:
        return False
    words = _words(page)
    if words is None or words[layout.MAGIC_AT] != layout.MAGIC:
        return is_armed_first
    if words[layout.PID] != pid:
        return False
    if words[layout.PHASE] == layout.PHASE_STARTING:
        return is_armed_first
    return bool(words[layout.DEFERRED] >> number & 1) and process_tree.catches(pid, number)


def _words(page: str) -> "memoryview[int] | None":
    try:
        with open(page, "rb") as file:
            octets = file.read(_WORDS)
    except OSError:
        return None
    return memoryview(octets).cast("q") if len(octets) == _WORDS else None
