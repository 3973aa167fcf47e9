"""A thread for calls that may hang, which delays neither the loop nor the end of the process."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class DetachedThread(Generic[T]):
    """Runs one call at a time: while one hangs, no other begins."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T], within_s: float) -> T | None:
        """The result of the call; None if it, or one before it, takes longer."""
        if self._thread is not None and self._thread.is_alive():
            return None
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def call() -> None:
            try:
                finish, outcome = _succeed, work()
            except Exception as error:  # noqa: BLE001  raised in the caller that awaits it
                finish, outcome = _fail, error  # type: ignore[assignment]
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(finish, done, outcome)

        # Not of the loop's pool: at its end the process would wait for it.
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
