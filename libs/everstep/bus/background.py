"""Loops that run in the background of a block and end with it."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager


@asynccontextmanager
async def in_background(*loops: Coroutine[object, object, None]) -> AsyncIterator[None]:
    """Run the loops while the block runs. A loop that fails ends the block.

    An error of the block is raised as it is, not wrapped into a group.
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
