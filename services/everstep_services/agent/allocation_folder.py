"""The folder of an allocation: how agents ended, and which nodes the scheduler wants back.

All nodes of the allocation and its batch script share the folder. It has at most three files for
each node: the agent writes `NODE.end` and `NODE.excluded`, and the script writes `NODE.leave`.
"""

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.evidence.files import read_regular
from everstep_services.agent.core.actions import ExitAgent

END, LEAVE, EXCLUDED = ".end", ".leave", ".excluded"
_LONGEST_REASON = 500
_LOOK_EVERY_S = 2.0


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How one agent ended."""

    node: str
    code: int
    cause: str
    reason: str
    ends_job: bool
    """The code is that of the job; otherwise this node left alone, and others may continue."""
    had_work: bool = True
    """Its ranks trained: without work a preemption costs nothing, whatever the code."""


class AllocationFolderError(EverstepError):
    """The folder cannot be used."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"the folder of the allocation, {path}, cannot be written: {error.strerror}; name one "
            f"that all nodes share, as allocation_dir in [agent] or EVERSTEP_AGENT__ALLOCATION_DIR"
        )


class AllocationFolder:
    """Reads and writes the files of one folder; each is replaced as a whole."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, path: Path | None) -> "AllocationFolder | None":
        """The folder at this path; None without a path."""
        return None if path is None else cls(path)

    def create(self) -> None:
        """Make it, with its parents."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise AllocationFolderError(self.path, error) from error

    def write_end(self, node: str, exiting: ExitAgent) -> None:
        """Tell the batch script with which code this agent exits, and whose code that is."""
        end = AgentEnd(
            node=node,
            code=exiting.code,
            cause=exiting.cause,
            reason=exiting.reason[:_LONGEST_REASON],
            ends_job=exiting.ends_job,
            had_work=exiting.had_work,
        )
        self._write(node + END, msgspec.json.encode(end))

    def ends(self) -> Iterator[AgentEnd]:
        """How each agent ended that has written so; damaged files are skipped."""
        for path in sorted(self.path.glob(f"*{END}")):
            with suppress(OSError, msgspec.DecodeError, msgspec.ValidationError):
                yield msgspec.json.decode(read_regular(path), type=AgentEnd)

    def write_exclusion(self, node: str, reason: str) -> None:
        """Tell the batch script why this node is excluded; without a reason: no longer."""
        if reason:
            self._write(node + EXCLUDED, reason[:_LONGEST_REASON].encode())
            return
        try:
            (self.path / (node + EXCLUDED)).unlink(missing_ok=True)
        except OSError as error:
            raise AllocationFolderError(self.path, error) from error

    def exclusions(self) -> dict[str, str]:
        """The nodes that are excluded, with the reason; none if the folder cannot be read now."""
        excluded: dict[str, str] = {}
        for path in sorted(self.path.glob(f"*{EXCLUDED}")):
            with suppress(OSError):
                text = read_regular(path).decode(errors="replace")
                excluded[path.name.removesuffix(EXCLUDED)] = " ".join(text.split())
        return excluded

    def ask_to_leave(self, node: str, reason: str) -> None:
        """Have the agent of this node save and leave, as at a preemption."""
        self._write(node + LEAVE, reason[:_LONGEST_REASON].encode())

    def leave_reason(self, node: str) -> str | None:
        """Why this node must leave; None if it need not, or the folder cannot be read now."""
        try:
            text = read_regular(self.path / (node + LEAVE)).decode(errors="replace")
        except OSError:
            return None
        return " ".join(text.split()) or "the scheduler wants the node back"

    def _write(self, name: str, data: bytes) -> None:
        try:
            descriptor, temporary = tempfile.mkstemp(dir=self.path, prefix=f".{name}-")
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path / name)
        except OSError as error:
            raise AllocationFolderError(self.path, error) from error


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
