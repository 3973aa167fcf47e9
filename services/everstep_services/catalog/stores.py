"""Reads and changes the files of checkpoints, in threads: a storage may never answer."""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar, cast

from everstep.errors import EverstepError
from trainer_sdk.checkpoint.manifest import step_name
from trainer_sdk.checkpoint.schedule.write_rate import Throttle
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for
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


class OutOfReachError(EverstepError):
    """The catalog cannot see these files. It does not conclude that they are gone."""


@dataclass(frozen=True, slots=True)
class StoreContents:
    """The checkpoints in a root."""

    root: str
    job: str
    checkpoints: Sequence[StoredCheckpoint]


class CheckpointStores:
    """The folders and object stores with checkpoints that this process can reach."""

    def __init__(self, bytes_per_s: int) -> None:
        self._bytes_per_s = bytes_per_s

    async def scan(self, root: str, steps: Collection[int] | None = None) -> StoreContents:
        """Every checkpoint in a root, or those of `steps`; `OutOfReachError` if it is hidden."""

        def work() -> StoreContents:
            storage = storage_for(root)
            job = _owner(storage, root)
            if steps is None:
                checkpoints = stored_checkpoints(storage)
            else:
                looked = (look(storage, step) for step in sorted(steps))
                checkpoints = [checkpoint for checkpoint in looked if checkpoint is not None]
            _owner(storage, root)  # if the root went meanwhile, the result is void
            return StoreContents(root, job, checkpoints)

        return await _in_thread(work)

    async def names(self, job: str, root: str) -> Collection[str]:
        """The names of the folders in a root, listed in one request."""
        listed = self._with(job, root, lambda storage: storage.folders())
        return set(await _soon(root, listed, _GLANCE_S))

    async def look(self, job: str, root: str, step: int) -> StoredCheckpoint | None:
        """One checkpoint as its files show it; None if it is not there."""
        return await _soon(root, self._with(job, root, lambda storage: look(storage, step)))

    async def verify(
        self, job: str, root: str, step: int, manifest_hash: str = ""
    ) -> tuple[Verification | None, float]:
        """Compare every byte, at the allowed rate; return the verdict and the seconds it took.

        There is no verdict if the checkpoint is not there, goes while it is read, or was replaced.
        """
        throttle, passed = Throttle(self._bytes_per_s), 0

        def read(size: int) -> None:
            nonlocal passed
            passed += size
            if not throttle.let(passed):
                raise OutOfReachError("the caller has stopped waiting")

        def work(storage: Storage) -> tuple[Verification | None, float]:
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
        return await self._with(job, root, lambda storage: storage.remove(step_name(step)))

    async def leavings(
        self, job: str, root: str, after_s: float, live_round: int | None
    ) -> Sequence[Leftover]:
        """What failed saves have left in a root."""

        def work(storage: Storage) -> Sequence[Leftover]:
            return leftovers(storage, after_s=after_s, live_round=live_round)

        return await self._with(job, root, work)

    async def sweep(self, job: str, root: str, leftovers: Sequence[Leftover]) -> tuple[int, int]:
        """Remove leftovers that have not changed since; return their number and bytes."""

        def work(storage: Storage) -> tuple[int, int]:
            freed = [
                size for leftover in leftovers if (size := sweep(storage, leftover)) is not None
            ]
            return len(freed), sum(freed)

        return await self._with(job, root, work)

    async def _mark(
        self, job: str, root: str, step: int, name: str, content: CheckpointMark | None
    ) -> None:
        def work(storage: Storage) -> None:
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

    async def _with(self, job: str, root: str, work: Callable[[Storage], T]) -> T:
        def owned() -> T:
            storage = storage_for(root)
            owner = _owner(storage, root)
            if owner != job:
                raise OutOfReachError(f"{root} has checkpoints of {owner}, not of {job}")
            return work(storage)

        return await _in_thread(owned)


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


async def _in_thread(work: Callable[[], T]) -> T:
    """The result of `work`. The thread is a daemon, so that a hanging storage delays no exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        outcome = _outcome(work)
        with suppress(RuntimeError):  # the loop is closed: no caller is left
            loop.call_soon_threadsafe(_settle, done, *outcome)

    threading.Thread(target=run, name="shelf", daemon=True).start()
    return await done


def _outcome(work: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return work(), None
    except StorageError as error:
        return None, OutOfReachError(str(error))
    except BaseException as error:  # noqa: BLE001  the caller that awaits it gets it
        return None, error


def _settle(done: "asyncio.Future[T]", result: T | None, error: BaseException | None) -> None:
    if done.cancelled():
        return
    if error is not None:
        done.set_exception(error)
    else:
        done.set_result(cast("T", result))
