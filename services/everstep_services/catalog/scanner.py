"""Compares the index with the files, which may change while they are listed."""

from collections.abc import Collection

from everstep_services.catalog.domain.files import compare, doubts, moved
from everstep_services.catalog.domain.index import Index
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.storage_threads import OutOfReachError
from everstep_services.catalog.stores import CheckpointStores, StoreContents


class Scanner:
    """Takes over only what it saw after it read the index, if the index has not changed since."""

    def __init__(self, indexer: Indexer, stores: CheckpointStores) -> None:
        self._indexer = indexer
        self._stores = stores

    async def scan(self, root: str, job: str | None = None) -> tuple[StoreContents, int, int]:
        """The contents of a root, and the numbers of new and of missing checkpoints in it."""
        seen = await self._stores.scan(root)
        _check(seen, job)
        index = await self._indexer.read(seen.job)
        steps = doubts(index, root, seen.checkpoints, self._indexer.now())
        new, missing = await self.look_again(seen.job, root, steps)
        return seen, new, missing

    async def glance(self, index: Index, root: str) -> Collection[int]:
        """Mark checkpoints without a folder in this copy of the index; return the steps to check.

        The names are listed after the index was read: it lacks what was saved since.
        """
        names = await self._stores.names(index.job, root)
        return moved(index, root, names, self._indexer.now())

    async def look_again(self, job: str, root: str, steps: Collection[int]) -> tuple[int, int]:
        """Compare these steps only; return the number of new and of missing checkpoints."""
        before = await self._indexer.read(job)
        seen = await self._stores.scan(root, steps)
        _check(seen, job)
        return await self._indexer.change(
            job,
            lambda index, now: compare(
                index, root, seen.checkpoints, now, steps=steps, before=before
            ),
        )


def _check(seen: StoreContents, job: str | None) -> None:
    if job not in (None, seen.job):
        raise OutOfReachError(f"{seen.root} has checkpoints of {seen.job}, not of {job}")
