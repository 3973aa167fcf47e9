"""Calls that wait on a connection, each in a thread, and ended with their task."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Abortable(Protocol):
    """What the call waits on."""

    def abort(self) -> None:
        """Whoever waits on it stops."""
        ...


@contextmanager
def threads(most: int, name: str) -> Iterator[Executor]:
    """For calls by `in_thread` alone: all of them have ended by the end."""
    pool = ThreadPoolExecutor(most, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)


async def in_thread(pool: Executor, waits_on: Abortable, call: Callable[[], T]) -> T:
    """What the call returns. Cancelled, it is aborted, and has ended when this returns."""
    working = pool.submit(call)
    done = asyncio.wrap_future(working)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        waits_on.abort()
        if not working.cancel():
            await asyncio.wait([done])
            done.exception()  # what it says of its end, nobody needs
        raise
