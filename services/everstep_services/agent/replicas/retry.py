"""Is whoever has broken off asked again? As long as more of a state comes, now and then."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic

from everstep_services.agent.replicas.protocol import ReplicaError

log = logging.getLogger(__name__)

_STILL_MOST_S = 30.0
"""A node may pause for some seconds; the ranks of a round do not wait longer for one than this."""
_PAUSE_S = 0.5
_MAY_PASS = frozenset({"slow", "closed"})
"""Who refuses a connection, or does not have it, will not do better the next time."""

Attempt = Callable[[], Awaitable[None]]


class Coming:
    """How far a state has come, and when more of it came last."""

    def __init__(self) -> None:
        self._offset = 0
        self._moved_at = monotonic()

    def reached(self, offset: int) -> None:
        """So much is here. Any thread may say so."""
        if offset > self._offset:
            self._offset, self._moved_at = offset, monotonic()

    @property
    def stands_still(self) -> bool:
        """Nothing has come for so long that nobody should wait for it."""
        return monotonic() - self._moved_at > _STILL_MOST_S


async def take_from_one(attempts: Sequence[Attempt], coming: Coming) -> None:
    """Until one of them has taken all of it; each goes on where the one before has ended.

    `ReplicaError` when nobody is worth another attempt.
    """
    left, said = list(attempts), dict[str, None]()
    while left:
        again = []
        for attempt in left:
            try:
                await attempt()
            except ReplicaError as error:
                said[str(error)] = None
                log.warning("image_not_fetched error=%s", error)
                if error.cause in _MAY_PASS:
                    again.append(attempt)
            else:
                return
        left = [] if coming.stands_still else again
        if left:
            await asyncio.sleep(_PAUSE_S)
    raise ReplicaError("; ".join(said))
