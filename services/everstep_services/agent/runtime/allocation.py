"""What an agent and the batch script of its allocation tell each other."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.allocation_folder import AllocationFolder, AllocationFolderError
from everstep_services.agent.core.actions import ExitAgent

_LOOK_EVERY_S = 2.0


class AllocationLink:
    """The files of one agent in the folder of its allocation; without a folder it does nothing."""

    def __init__(
        self,
        folder: Path | None,
        node: str,
        clock: Clock,
        *,
        leave: Callable[[str], None],
        warn: Callable[[str], object],
    ) -> None:
        """`leave` is called when the script wants this node to leave, with its reason."""
        self._folder = AllocationFolder.of(folder)
        self._node = node
        self._clock = clock
        self._leave = leave
        self._warn = warn
        self.exclusion = ""
        """Why rendezvous refuses this node as excluded; empty if it does not."""

    def loops(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """What must run in the background."""
        return () if self._folder is None else (self._exchange_notices,)

    async def write_end(self, exiting: ExitAgent) -> None:
        """Tell the batch script how this agent ends."""
        if self._folder is not None:
            await self._write(partial(self._folder.write_end, self._node, exiting))

    async def _exchange_notices(self) -> None:
        """Report exclusions until the script wants this node to leave."""
        assert self._folder is not None
        folder, reason, written = self._folder, None, ""
        while reason is None:
            await self._clock.sleep(_LOOK_EVERY_S)
            if self.exclusion != written:
                written = self.exclusion
                await self._write(partial(folder.write_exclusion, self._node, written))
            reason = await asyncio.to_thread(folder.leave_reason, self._node)
        self._leave(reason)

    async def _write(self, write: Callable[[], None]) -> None:
        try:
            await asyncio.to_thread(write)
        except AllocationFolderError as error:
            self._warn(str(error))
