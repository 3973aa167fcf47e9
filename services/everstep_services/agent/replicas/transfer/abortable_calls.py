"""Calls that wait on a connection: each runs in a thread, and ends when its task is cancelled."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Protocol, TypeVar

T = TypeVar("T")


class Abortable(Protocol):
    """The connection that a call waits on."""

    def abort(self) -> None:
        """End every wait on it."""


@contextmanager
def threads(most: int, name: str) -> Iterator[Executor]:
    """Threads for calls of `in_thread` only, which have all ended at the end of the block."""
    pool = ThreadPoolExecutor(most, name)
    try:
        yield pool
    finally:
        pool.shutdown(wait=False)


async def in_thread(pool: Executor, waits_on: Abortable, call: Callable[[], T]) -> T:
    """Run the call and return its result. On cancellation it is aborted first."""
    working = pool.submit(call)
    done = asyncio.wrap_future(working)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        waits_on.abort()
        if not working.cancel():
            await asyncio.wait([done])
            done.exception()  # nobody needs its outcome
        raise
