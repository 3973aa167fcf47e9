"""Decides when a connection moves to another server of its cluster.

A server that is cut off from the others still answers its clients, so only they can leave it: when
it reports that it reaches less than half of the servers, or when nobody acknowledges what they
write. When a server has come back, its share of all clients moves to it.
"""

import random
from collections.abc import Collection
from dataclasses import dataclass
from math import inf

from everstep.backoff import Backoff

_SPREAD_S = 60.0
_SETTLES_S = 10.0
_WAIT_FIRST_S = 10.0
_WAIT_MOST_S = 120.0
_TRIED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Move:
    """Move after a while, to this server or to any other."""

    after_s: float
    reason: str
    to: str | None = None


class ServerChoice:
    """Pure: its caller has the clock, and the connection."""

    def __init__(self, servers: int, writes_within_s: float, jitter_s: float) -> None:
        self._writes_within_s = writes_within_s
        self._jitter_s = jitter_s
        self.servers: frozenset[str] = frozenset()
        """The addresses that the server reported last."""
        self._most = servers
        self._unanswered_since: float | None = None
        self._silent_since: float | None = None
        """When the first write was sent after the last one that was acknowledged."""
        self._silent_at = -inf
        """When the last write failed."""
        self.changed_at = -inf
        """When the server last reported other servers than before."""
        self._waits = Backoff(_WAIT_FIRST_S, _WAIT_MOST_S)
        self._stays_until = self._settles_until = 0.0

    def reported(self, servers: Collection[str], now: float, *, is_first: bool) -> Move | None:
        """The server reports the addresses at which clients reach it and the others.

        `is_first`: it is the server's first report on this connection.
        """
        before, self.servers = self.servers, frozenset(servers)
        if before and before != self.servers:
            self.changed_at = now
        count = len(self.servers)
        if 0 < 2 * count <= self._most:
            move = self._away(now, f"it reaches {count} of {self._most} servers")
            if move is None:
                self._most = count  # the others reach no more: this is the cluster now
            return move
        self._most = max(self._most, count)
        returned = sorted(self.servers - before)
        if is_first or not returned or now < self._settles_until:
            return None
        if random.random() * count >= len(returned):  # noqa: S311
            return None
        after_s = random.uniform(0, _SPREAD_S)  # noqa: S311
        # A server that has just come back finds the others one by one: they have not come back.
        self._settles_until = now + after_s + _SETTLES_S
        return Move(after_s, "a server has come back", random.choice(returned))  # noqa: S311

    @property
    def is_cluster(self) -> bool:
        """Whether there are, or were, several servers."""
        return self._most > 1 or len(self.servers) > 1 or self.changed_at > -inf

    def acknowledged(self) -> None:
        """A write was acknowledged."""
        self._unanswered_since = self._silent_since = None
        self._waits.reset()

    def unanswered(self, sent_at: float, now: float) -> Move | None:
        """A write of that time was not acknowledged."""
        if self._unanswered_since is None:
            self._unanswered_since = sent_at
        if self._silent_since is None:
            self._silent_since = sent_at
        self._silent_at = now
        waited_s = now - self._unanswered_since
        if waited_s < self._writes_within_s:
            return None
        return self._away(now, f"no write was acknowledged for {waited_s:.0f} s")

    def silent_s(self, now: float) -> float:
        """How long writes have failed; 0 while none is tried, because then nobody knows."""
        if self._silent_since is None or now - self._silent_at > _TRIED_WITHIN_S:
            return 0.0
        return self._silent_at - self._silent_since

    def _away(self, now: float, reason: str) -> Move | None:
        if now < self._stays_until:
            return None
        self._stays_until = now + self._waits.failed()
        self._unanswered_since = None
        return Move(random.uniform(0, self._jitter_s), reason)  # noqa: S311
