"""Reads and changes the files of checkpoints, in threads: a storage may never answer."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from everstep_services.catalog.storage_threads import (
    OutOfReachError,
    StorageProgress,
    StorageThreads,
)
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.schedule.write_rate import Throttle
from trainer_sdk.checkpoint.storage import Storage
from trainer_sdk.checkpoint.storage.checkpoints import (
    PINNED,
    QUARANTINED,
    CheckpointMark,
    GoneError,
    StoredCheckpoint,
    Verification,
    look,
    mark,
    owner_of,
    quarantine,
    stored_checkpoints,
    unmark,
    verify,
)
from trainer_sdk.checkpoint.storage.leftovers import Leftover, leftovers, sweep

T = TypeVar("T")
_SOON_S = 2.0
_GLANCE_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The checkpoints in a root."""

    root: str
    job: str
    checkpoints: Sequence[StoredCheckpoint]


class CheckpointStores:
    """The folders and object stores with checkpoints that this process can reach."""

    def __init__(self, bytes_per_s: int, threads: StorageThreads | None = None) -> None:
        self._bytes_per_s = bytes_per_s
        self.threads = threads or StorageThreads()

    async def scan(self, root: str, steps: Collection[int] | None = None) -> StoreContents:
        """Every checkpoint in a root, or those of `steps`; `OutOfReachError` if it is hidden."""

        def work(storage: Storage, _: StorageProgress) -> StoreContents:
            job = _owner(storage, root)
            if steps is None:
                checkpoints = stored_checkpoints(storage)
            else:
                looked = (look(storage, step) for step in sorted(steps))
                checkpoints = [checkpoint for checkpoint in looked if checkpoint is not None]
            _owner(storage, root)  # if the root went meanwhile, the result is void
            return StoreContents(root, job, checkpoints)

        return await self.threads.run(root, work)

    async def names(self, job: str, root: str) -> Collection[str]:
        """The names of the folders in a root, listed in one request."""
        listed = self._with(job, root, lambda storage, _: storage.folders())
        return set(await _soon(root, listed, _GLANCE_S))

    async def look(self, job: str, root: str, step: int) -> StoredCheckpoint | None:
        """One checkpoint as its files show it; None if it is not there."""
        return await _soon(root, self._with(job, root, lambda storage, _: look(storage, step)))

    async def verify(
        self, job: str, root: str, step: int, manifest_hash: str = ""
    ) -> tuple[Verification | None, float]:
        """Compare every byte, at the allowed rate; return the verdict and the seconds it took.

        There is no verdict if the checkpoint is not there, goes while it is read, or was replaced.
        """
        throttle, passed = Throttle(self._bytes_per_s), 0

        def work(storage: Storage, progress: StorageProgress) -> tuple[Verification | None, float]:
            def read(size: int) -> None:
                nonlocal passed
                passed += size
                progress.pause()
                if not throttle.let(passed):
                    raise OutOfReachError("the caller has stopped waiting")
                progress.move()

            began = time.monotonic()
            stored = look(storage, step)
            verdict = None
            if stored is not None and _is_expected(stored, manifest_hash):
                with suppress(GoneError):
                    verdict = verify(storage, stored, read)
            if verdict is None or not verdict.is_good:
                _owner(storage, root)  # if the root went meanwhile, there is no verdict
            return verdict, time.monotonic() - began

        try:
            return await self._with(job, root, work)
        finally:
            throttle.lift()

    async def pin(self, job: str, root: str, step: int, pinned: CheckpointMark | None) -> None:
        """Write or remove the mark next to the files that pins them."""
        await self._mark(job, root, step, PINNED, pinned)

    async def quarantine(
        self, job: str, root: str, step: int, quarantined: CheckpointMark | None
    ) -> None:
        """Write or remove the mark next to the files that forbids to restore them."""
        await self._mark(job, root, step, QUARANTINED, quarantined)

    async def remove(self, job: str, root: str, step: int) -> int:
        """Remove a checkpoint; return the bytes that this frees."""
        return await self._with(job, root, lambda storage, _: storage.remove(step_name(step)))

    async def leavings(
        self, job: str, root: str, after_s: float, live_round: int | None
    ) -> Sequence[Leftover]:
        """What failed saves have left in a root."""

        def work(storage: Storage, _: StorageProgress) -> Sequence[Leftover]:
            return leftovers(storage, after_s=after_s, live_round=live_round)

        return await self._with(job, root, work)

    async def sweep(self, job: str, root: str, leftovers: Sequence[Leftover]) -> tuple[int, int]:
        """Remove leftovers that have not changed since; return their number and bytes."""

        def work(storage: Storage, _: StorageProgress) -> tuple[int, int]:
            freed = [
                size for leftover in leftovers if (size := sweep(storage, leftover)) is not None
            ]
            return len(freed), sum(freed)

        return await self._with(job, root, work)

    async def _mark(
        self, job: str, root: str, step: int, name: str, content: CheckpointMark | None
    ) -> None:
        def work(storage: Storage, _: StorageProgress) -> None:
            there = None if content is None else look(storage, step)
            if content is None:
                unmark(storage, step, name)
            elif there is None:
                return  # a mark must never be the only file of a folder
            elif name == QUARANTINED:
                quarantine(storage, there, content)
            elif there.pinned is None:
                mark(storage, step, name, content)

        await _soon(root, self._with(job, root, work))

    async def _with(self, job: str, root: str, work: Callable[[Storage, StorageProgress], T]) -> T:
        def owned(storage: Storage, progress: StorageProgress) -> T:
            owner = _owner(storage, root)
            if owner != job:
                raise OutOfReachError(f"{root} has checkpoints of {owner}, not of {job}")
            return work(storage, progress)

        return await self.threads.run(root, owned)


def _is_expected(stored: StoredCheckpoint, manifest_hash: str) -> bool:
    """The checkpoint has the expected manifest, or one that cannot be read."""
    return stored.manifest is None or manifest_hash in ("", stored.manifest_hash)


def _owner(storage: Storage, root: str) -> str:
    job = owner_of(storage)
    if job is None:
        raise OutOfReachError(f"the catalog cannot see {root}: it has no owner.json")
    return job


async def _soon(root: str, work: Awaitable[T], within_s: float = _SOON_S) -> T:
    """The result of a small request for which a caller waits."""
    try:
        async with asyncio.timeout(within_s):
            return await work
    except TimeoutError as error:
        raise OutOfReachError(f"{root} did not answer within {within_s:g} s") from error
