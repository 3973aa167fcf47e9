"""Clears away what saves have left that came to nothing."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.shelves import OutOfReachError, Shelves
from trainer_sdk.checkpoint.storage.leftovers import Leftover

log = logging.getLogger(__name__)
_LOOK_S = 2.5


@dataclass(frozen=True, slots=True)
class Left:
    """What may go from a root."""

    root: str
    leavings: Sequence[Leftover]


class Sweeper:
    """Nothing goes that a round which runs may still be writing."""

    def __init__(self, shelves: Shelves, after_s: float) -> None:
        self._shelves = shelves
        self._after_s = after_s

    async def look(self, index: Index, roots: Iterable[str]) -> Sequence[Left]:
        """What is there, root after root."""
        live = index.round if index.slots else None
        return [
            Left(root, await self._shelves.leavings(index.job, root, self._after_s, live))
            for root in roots
        ]

    async def look_soon(self, index: Index) -> tuple[Sequence[Left], str]:
        """What is there, for somebody who waits; why nobody can say."""
        try:
            async with asyncio.timeout(_LOOK_S):
                return await self.look(index, sorted(index.roots)), ""
        except TimeoutError:
            return (), f"a storage did not answer within {_LOOK_S:g} s"
        except OutOfReachError as error:
            return (), str(error)

    async def sweep(self, job: str, found: Iterable[Left]) -> int:
        """Remove it, unless it has changed meanwhile; how many are gone."""
        swept = 0
        for one in found:
            if one.leavings:
                count, freed = await self._shelves.sweep(job, one.root, one.leavings)
                swept += count
                log.info("swept job=%s root=%s count=%d bytes=%d", job, one.root, count, freed)
        return swept
