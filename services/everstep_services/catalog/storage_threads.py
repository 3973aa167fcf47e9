"""Reads and changes storages in threads. A storage that hangs takes few, and delays no other.

A thread that waits for a hung file system cannot be ended. So each root has its own threads, and a
root that is silent gets another only after a pause that grows, and at most a handful of them.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from everstep.errors import EverstepError
from trainer_sdk.checkpoint.storage import Storage, StorageError, storage_for

log = logging.getLogger(__name__)
T = TypeVar("T")
HANGS_AFTER_S = 60.0
SILENT_AFTER_S = 0.5
_MOST_SILENT = 4
_MOST_OF_ROOT = 16
_MOST_IN_ALL = 1024
_MOST_ROOTS = 4096
PAUSE_S = 60.0
_LONGEST_PAUSE_S = 3600.0


class OutOfReachError(EverstepError):
    """The catalog cannot see these files. It does not conclude that they are gone."""


class StorageProgress:
    """When a thread last got an answer of its storage."""

    def __init__(self) -> None:
        self.done: asyncio.Future[tuple[object, BaseException | None]] = (
            asyncio.get_running_loop().create_future()
        )
        self._at = time.monotonic()

    def move(self) -> None:
        """The storage has answered."""
        self._at = time.monotonic()

    def pause(self) -> None:
        """The thread waits for something else than its storage, until it moves again."""
        self._at = float("inf")

    @property
    def silent_s(self) -> float:
        """How long the storage has not answered."""
        return time.monotonic() - self._at


class _WatchedStorage:
    """A storage whose answers are noted."""

    def __init__(self, storage: Storage, progress: StorageProgress) -> None:
        self._storage = storage
        self._progress = progress

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._storage, name)
        if not callable(value):
            return value

        def call(*args: Any, **options: Any) -> Any:
            try:
                return value(*args, **options)
            finally:
                self._progress.move()

        return call


@dataclass(slots=True)
class _Root:
    pause_s: float
    """Until a silent root is asked again."""
    running: set[StorageProgress] = field(default_factory=set)
    hangs: bool = False
    not_before: float = 0.0

    def silent(self) -> list[StorageProgress]:
        """Its threads that wait for it."""
        return [thread for thread in self.running if thread.silent_s >= SILENT_AFTER_S]


class StorageThreads:
    """The threads of all roots."""

    def __init__(self, hangs_after_s: float = HANGS_AFTER_S, pause_s: float = PAUSE_S) -> None:
        self._hangs_after_s = hangs_after_s
        self._pause_s = pause_s
        self._roots: dict[str, _Root] = {}

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        roots = self._roots.values()
        return {
            "roots_hung": float(sum(root.hangs for root in roots)),
            "storage_threads": float(sum(len(root.running) for root in roots)),
        }

    def is_silent(self, root: str) -> bool:
        """Whether a thread waits for an answer of this root."""
        return root in self._roots and bool(self._roots[root].silent())

    async def run(self, root: str, work: Callable[[Storage, StorageProgress], T]) -> T:
        """The result of `work` on the storage; `OutOfReachError` if the root does not answer."""
        state = await self._admitted(root)
        progress = StorageProgress()
        state.running.add(progress)
        self._start(root, state, progress, work)
        try:
            while not progress.done.done():
                left_s = self._hangs_after_s - progress.silent_s
                if left_s <= 0:
                    self._hangs(root, state, progress)
                    raise self._refusal(root, state)
                await asyncio.wait({progress.done}, timeout=min(left_s, self._hangs_after_s))
        except asyncio.CancelledError:  # the caller has waited long enough
            if progress.silent_s >= SILENT_AFTER_S:
                state.not_before = time.monotonic() + state.pause_s
            raise
        result, error = progress.done.result()
        if error is not None:
            raise OutOfReachError(str(error)) if isinstance(error, StorageError) else error
        return cast("T", result)

    def _start(
        self,
        root: str,
        state: _Root,
        progress: StorageProgress,
        work: Callable[[Storage, StorageProgress], T],
    ) -> None:
        """Start the thread; it is a daemon, so that a hung storage delays no exit."""
        loop = asyncio.get_running_loop()

        def settle(outcome: tuple[object, BaseException | None]) -> None:
            state.running.discard(progress)
            self._answers(root, state)
            progress.done.set_result(outcome)

        def run() -> None:
            try:
                storage = cast("Storage", _WatchedStorage(storage_for(root), progress))
                outcome: tuple[object, BaseException | None] = work(storage, progress), None
            except BaseException as error:  # noqa: BLE001  the caller that awaits it gets it
                outcome = None, error
            with suppress(RuntimeError):  # the loop is closed: no caller is left
                loop.call_soon_threadsafe(settle, outcome)

        threading.Thread(target=run, name="checkpoint-storage", daemon=True).start()

    async def _admitted(self, root: str) -> _Root:
        """The state of a root that may have another thread."""
        if len(self._roots) >= _MOST_ROOTS:
            self._roots = {name: one for name, one in self._roots.items() if one.running}
        state = self._roots.setdefault(root, _Root(self._pause_s))
        while True:
            silent = len(state.silent())
            if silent >= _MOST_SILENT or (silent and time.monotonic() < state.not_before):
                raise self._refusal(root, state)
            if len(state.running) < _MOST_OF_ROOT:
                break
            await asyncio.wait(
                {thread.done for thread in state.running},
                timeout=SILENT_AFTER_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
        if sum(len(other.running) for other in self._roots.values()) >= _MOST_IN_ALL:
            raise OutOfReachError(
                f"{root} is not read: {_MOST_IN_ALL} threads wait for other storages already"
            )
        return state

    def _hangs(self, root: str, state: _Root, progress: StorageProgress) -> None:
        state.not_before = time.monotonic() + state.pause_s
        state.pause_s = min(state.pause_s * 2, _LONGEST_PAUSE_S)
        if not state.hangs:
            state.hangs = True
            log.warning("storage_hangs root=%s silent_s=%.0f", root, progress.silent_s)

    def _answers(self, root: str, state: _Root) -> None:
        if state.hangs:
            log.info("storage_answers root=%s", root)
        state.hangs, state.pause_s, state.not_before = False, self._pause_s, 0.0

    def _refusal(self, root: str, state: _Root) -> OutOfReachError:
        silent_s = max((thread.silent_s for thread in state.running), default=0.0)
        return OutOfReachError(
            f"{root} has not answered for {silent_s:.0f} s: look at its file system; the catalog "
            "asks it again by itself"
        )
