"""When the ranks of a round last made progress, and for how long that proves that it runs."""

from math import inf

from everstep.messages import NodeBeat

_SHORTEST_S = 0.25
_FORGOTTEN = 0.99
_MARGIN = 1.5
_OVERDUE = 1.2


class RoundProgress:
    """When the ranks of one round last made progress, and the longest time between two moves."""

    def __init__(self, number: int, heard_s: float) -> None:
        self.round = number
        self.heard_s = heard_s
        self.longest_s = 0.0
        """The longest time between two moves. It shrinks with each move, so that outliers fade."""
        self._mover = ""
        self._moved_s = -inf
        self._others_s = -inf
        self._marked_s = -inf
        self._was_late = False

    def advance(self, node: str, at_s: float, late_s: float = 0.0) -> None:
        """A rank of `node` made progress, perhaps `late_s` sooner: the beat had waited."""
        if node == self._mover:
            if at_s > self._moved_s:
                self._moved_s = at_s
        elif at_s > self._moved_s:
            self._mover, self._moved_s, self._others_s = node, at_s, self._moved_s
        elif at_s > self._others_s:
            self._others_s = at_s
        took_s = at_s - late_s - self._marked_s
        is_exact, self._was_late = not late_s and not self._was_late, late_s > 0.0
        if took_s < _SHORTEST_S:
            return
        if not late_s:
            self._marked_s = at_s
        if took_s < inf and (is_exact or late_s):
            self.longest_s = max(took_s, _FORGOTTEN * self.longest_s)

    def overdue_s(self, least_s: float, most_s: float) -> float:
        """The time at which a rank should have made progress again."""
        return self._moved_s + min(max(least_s, _OVERDUE * self.longest_s), most_s)

    def still_s(self, node: str, now_s: float) -> float:
        """The seconds since a rank of another node made progress; infinite if none has."""
        return max(0.0, now_s - (self._others_s if node == self._mover else self._moved_s))

    def moves(self, node: str, now_s: float, least_s: float, most_s: float) -> bool:
        """Whether a rank of another node has made progress lately: steps may be long.

        A move counts for one and a half times the longest time, but at least and at most this long.
        """
        moved_s = self._others_s if node == self._mover else self._moved_s
        return now_s - moved_s < min(max(least_s, _MARGIN * self.longest_s), most_s)


def youngest_s(beat: NodeBeat) -> float:
    """The seconds since a running rank of the node made progress; infinite if no rank tells.

    An age of exactly 0 tells nothing.
    """
    least_s = inf
    for rank in beat.ranks:
        if 0.0 < rank.progress_age_s < least_s and rank.state == "running":
            least_s = rank.progress_age_s
    return least_s


def done(beat: NodeBeat) -> int:
    """The steps and collectives that the running ranks of the node have finished."""
    running = (rank for rank in beat.ranks if rank.state == "running")
    return sum((rank.step or 0) + (rank.collectives or 0) for rank in running)


def last_step(beat: NodeBeat) -> int | None:
    """The last step that all ranks of the node had finished."""
    return min([rank.step for rank in beat.ranks if rank.step is not None], default=None)
