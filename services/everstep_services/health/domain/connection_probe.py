"""Whether a silent node's connection to the bus closed after its last beat, and stays closed.

An agent subscribes to its hail subject as long as it lives. The server knows the subscribers, and
answers at once that there are none: a killed process closes its connection for ever. A connection
that is only cut stays open for the server, for minutes: nobody takes a probe in, and its later end
says nothing about the agent.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

_PROBE_EVERY_S = 1.0
_REFUSALS_LEAST = 3
_TOGETHER_S = 3.0
"""Nodes that fell silent within this time may have lost the same server, and live."""


@dataclass(slots=True)
class ConnectionProbe:
    """The probes of one node since its last beat."""

    asked_s: float = -inf
    outlived: bool = False
    """The connection was open after the last beat: if it closes later, that proves nothing."""
    refusals: int = 0
    """The number of probes in a row that found no subscriber."""
    refused_s: float = inf
    """When the first of them was made, by the observer's clock."""
    closed_s: float = 0.0
    """The time from the first of them to the last."""

    def is_due(self, seen_s: float) -> bool:
        """Whether to probe now; if so, note it."""
        if self.outlived or seen_s - self.asked_s < _PROBE_EVERY_S:
            return False
        self.asked_s = seen_s
        return True

    def note(self, is_there: bool | None, seen_s: float) -> None:
        """Note a result, as `Fleet.probed` explains it."""
        if is_there is False:
            self.refused_s = min(self.refused_s, seen_s)
            self.refusals += 1
            self.closed_s = seen_s - self.refused_s
            return
        self.refusals, self.refused_s, self.closed_s = 0, inf, 0.0
        self.outlived |= is_there is None

    def is_closed(self, for_s: float) -> bool:
        """The connection closed after the last beat, and has been closed for `for_s`."""
        return not self.outlived and self.refusals >= _REFUSALS_LEAST and self.closed_s >= for_s


def is_alone(heard_s: float, disconnected: Sequence[float]) -> bool:
    """No other node with a closed connection was last heard at about the same time.

    `disconnected`: when each of them was last heard, sorted.
    """
    before = bisect_left(disconnected, heard_s - _TOGETHER_S)
    return bisect_right(disconnected, heard_s + _TOGETHER_S) - before <= 1
