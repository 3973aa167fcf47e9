"""Whether a silent node's connection to the bus closed with its last word, and stays closed.

An agent hears its hail subject for as long as it lives. The server knows who hears what, and says
at once when nobody does: a killed process closes its connection, and never opens it again. A
connection that is only cut stays open for the server, for minutes: then a question is taken in by
nobody, and what the server says once it gives up tells nothing about the agent.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_KNOCK_EVERY_S = 1.0
_REFUSALS_LEAST = 3
_TOGETHER_S = 3.0
"""Nodes that fell silent within this may have lost one server, and not their lives."""


@dataclass(slots=True)
class Door:
    """What was learned by asking whether anybody hears a node, since its last word."""

    asked_s: float = -inf
    outlived: bool = False
    """Its connection was there after its last word: that it closes later proves nothing."""
    refusals: int = 0
    """How often in a row nobody heard."""
    refused_s: float = inf
    """When that began, by the sighted clock."""
    shut_s: float = 0.0
    """For how long it has lasted, as was seen last."""

    def is_due(self, seen_s: float) -> bool:
        """Ask now; it is noted that this was done."""
        if self.outlived or seen_s - self.asked_s < _KNOCK_EVERY_S:
            return False
        self.asked_s = seen_s
        return True

    def answered(self, is_there: bool | None, seen_s: float) -> None:
        """As `Fleet.knocked` has it."""
        if is_there is False:
            self.refused_s = min(self.refused_s, seen_s)
            self.refusals += 1
            self.shut_s = seen_s - self.refused_s
            return
        self.refusals, self.refused_s, self.shut_s = 0, inf, 0.0
        self.outlived |= is_there is None

    def is_shut(self, for_s: float) -> bool:
        """It closed with the node's last word, and has been closed for so long."""
        return not self.outlived and self.refusals >= _REFUSALS_LEAST and self.shut_s >= for_s


def is_alone(word_s: float, last_words_s: Sequence[float]) -> bool:
    """Nobody else fell silent where nobody listens, at about the same time. They are in order."""
    before = bisect_left(last_words_s, word_s - _TOGETHER_S)
    return bisect_right(last_words_s, word_s + _TOGETHER_S) - before <= 1
