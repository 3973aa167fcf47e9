"""Compares the index with the files, which change while they are listed."""

from collections.abc import Collection

from everstep_services.catalog.domain.files import compare, doubts, moved
from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.stores import OutOfReachError, Seen, Shelves


class Scanner:
    """What it takes over was looked at after the index was read, and stands as it was read."""

    def __init__(self, indexer: Indexer, shelves: Shelves) -> None:
        self._indexer = indexer
        self._shelves = shelves

    async def scan(self, root: str, job: str | None = None) -> tuple[Seen, int, int]:
        """All that is in a root, and how many of it are new to the index, and how many gone."""
        seen = await self._shelves.scan(root)
        _check(seen, job)
        index = await self._indexer.read(seen.job)
        steps = doubts(index, root, seen.checkpoints, self._indexer.moment())
        new, missing = await self.look_again(seen.job, root, steps)
        return seen, new, missing

    async def glance(self, index: Index, root: str) -> Collection[int]:
        """Mark in this copy of the index what has no folder any more; the steps to look at again.

        The names are listed after the index was read: what was saved since is not in it.
        """
        names = await self._shelves.names(index.job, root)
        return moved(index, root, names, self._indexer.moment())

    async def look_again(self, job: str, root: str, steps: Collection[int]) -> tuple[int, int]:
        """Compare no more than these; how many are new, and how many of the root are gone."""
        before = await self._indexer.read(job)
        seen = await self._shelves.scan(root, steps)
        _check(seen, job)
        return await self._indexer.change(
            job,
            lambda index, now: compare(
                index, root, seen.checkpoints, now, steps=steps, before=before
            ),
        )


def _check(seen: Seen, job: str | None) -> None:
    if job not in (None, seen.job):
        raise OutOfReachError(f"{seen.root} has checkpoints of {seen.job}, not of {job}")
