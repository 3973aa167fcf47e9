"""A thread for calls that may hang: it keeps nobody waiting, and no process from its end."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class DetachedThread(Generic[T]):
    """One call at a time: while one hangs, nothing more is begun."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T], within_s: float) -> T | None:
        """What the call returns; None if it takes longer, or one before it does."""
        if self._thread is not None and self._thread.is_alive():
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                finish, outcome = _succeed, work()
            except Exception as error:  # noqa: BLE001  whoever awaits it gets it
                finish, outcome = _fail, error  # type: ignore[assignment]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, done, outcome)

        # Not one of the loop's pool: at its end the process would wait for it.
        self._thread = threading.Thread(target=call, name=self._name, daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(within_s):
                return await done
        except TimeoutError:
            return None


def _succeed(done: "asyncio.Future[T]", result: T) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: "asyncio.Future[T]", error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
