"""Whether the training of a round moves, as the beats of its nodes show."""

from math import inf

from everstep.messages import NodeBeat

_SHORTEST_S = 0.25
_FORGOTTEN = 0.99
_MARGIN = 1.5


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

    def advance(self, node: str, at_s: float) -> None:
        """A rank of `node` made progress."""
        if node == self._mover:
            self._moved_s = max(self._moved_s, at_s)
        elif at_s > self._moved_s:
            self._mover, self._moved_s, self._others_s = node, at_s, self._moved_s
        elif at_s > self._others_s:
            self._others_s = at_s
        took_s = at_s - self._marked_s
        if took_s >= _SHORTEST_S:
            self._marked_s = at_s
            if took_s < inf:
                self.longest_s = max(took_s, _FORGOTTEN * self.longest_s)

    def still_s(self, node: str, now_s: float) -> float:
        """The seconds since a rank of another node made progress; infinite if none has."""
        moved_s = self._others_s if node == self._mover else self._moved_s
        return max(0.0, now_s - moved_s)

    def proves_for_s(self, least_s: float, most_s: float) -> float:
        """How long after a move the training counts as moving: its steps may be long."""
        return min(max(least_s, _MARGIN * self.longest_s), most_s)


def progress_age_s(beat: NodeBeat, before: NodeBeat | None) -> float | None:
    """The seconds since a rank of the node made progress; None if the beat does not show it.

    A beat without progress has an age of exactly 0. That counts only if a step or a collective was
    finished since the previous beat.
    """
    youngest_s = inf
    for rank in beat.ranks:
        if 0.0 < rank.progress_age_s < youngest_s and rank.state == "running":
            youngest_s = rank.progress_age_s
    if youngest_s < inf:
        return youngest_s
    done = _done(beat)
    if before is None or before.round != beat.round or not done:
        return None
    return 0.0 if done != _done(before) else None


def _done(beat: NodeBeat) -> int:
    running = (rank for rank in beat.ranks if rank.state == "running")
    return sum((rank.step or 0) + (rank.collectives or 0) for rank in running)
