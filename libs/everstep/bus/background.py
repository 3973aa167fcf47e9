"""Loops that run beside a body and end with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def beside(*loops: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run the loops while the body runs. One that fails takes the body with it.

    An error of the body comes out as itself, not wrapped into a group.
    """
    raised: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(loop) for loop in loops]
            try:
                yield
            except Exception as error:  # noqa: BLE001  carried out unwrapped, below
                raised = error
            finally:
                for task in running:
                    task.cancel()
    except ExceptionGroup as group:
        raise (group.exceptions[0] if len(group.exceptions) == 1 else group) from None
    if raised is not None:
        raise raised
