"""Sees ranks of another launcher come, hears their messages, and learns how they ended."""

import asyncio
import fcntl
import os
import select
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.ranks.protocol import WardenEvent
from everstep_services.agent.ranks.round_watch import RoundWatch
from trainer_sdk.attachment import PAGE
from trainer_sdk.launchers import LaunchedRank, launcher_of
from trainer_sdk.page import BadPageError, PageView, view_page
from trainer_sdk.wire import Gone, Spawned


@dataclass(frozen=True, slots=True)
class FoundPage:
    """A rank that has opened its page."""

    round: int
    rank: int
    local_rank: int
    pid: int
    folder: Path
    page: PageView


class PageFinder:
    """Finds each page of a job once, also a page that replaced another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known: dict[Path, int] = {}

    def look(self, oldest: int) -> list[FoundPage]:
        """The new pages of the first round, from this one on, that has any."""
        for number, at in sorted(_numbered(self._folder)):
            if number >= oldest:
                pages = [
                    folder
                    for place in sorted(at.iterdir())
                    if (folder := self._found(number, place))
                ]
                if pages:
                    return pages
        return []

    def _found(self, number: int, place: Path) -> FoundPage | None:
        rank, dash, local_rank = place.name.partition("-")
        path = place / PAGE
        if not dash or not rank.isdecimal() or not local_rank.isdecimal():
            return None
        try:
            inode = os.stat(path).st_ino
            if self._known.get(path) == inode:
                return None
            page = view_page(str(path))
        except (OSError, ValueError):
            return None  # not there yet, or gone again
        self._known[path] = inode
        try:
            reading = page.read()
        except BadPageError:
            reading = None
        if reading is None or (reading.round, reading.rank) != (number, int(rank)):
            page.close()
            return None
        return FoundPage(number, int(rank), int(local_rank), reading.pid, place, page)


def _numbered(folder: Path) -> Iterator[tuple[int, Path]]:
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return
    for page in entries:
        if page.name.isdecimal() and page.is_dir():
            yield int(page.name), page


_GET_INFO = 0xC040FF0B  # PIDFD_GET_INFO, for the first version of its answer
_INFO = struct.Struct("QQ11Ii")
_EXIT = 1 << 3


def is_over(handle: int) -> bool:
    """The process of this handle has ended."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    return bool(poll.poll(0))


def ending_of(pid: int, handle: int) -> tuple[int | None, int | None]:
    """Its exit code, or the signal that ended it; neither if that cannot be known.

    Until its parent has reaped it, /proc has it; kernels from 6.15 on keep it for holders of a
    handle.
    """
    status = _kept(handle)
    if status is None:
        status = _shown(pid)
    if status is None:
        status = _kept(handle)  # its parent has just reaped it
    if status is None:
        return None, None
    if os.WIFSIGNALED(status):
        return None, os.WTERMSIG(status)
    return os.WEXITSTATUS(status), None


def _kept(handle: int) -> int | None:
    asked = bytearray(_INFO.pack(_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(handle, _GET_INFO, asked)
    except OSError:
        return None
    mask, *_, status = _INFO.unpack(asked)
    return status if mask & _EXIT else None


def _shown(pid: int) -> int | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[49]) if fields[0] in {"Z", "X"} else None
    except (OSError, ValueError, IndexError):
        return None


_LOOK_EVERY_S = 1.0
_LARGEST_DATAGRAM = 1 << 16
_AT_ONCE = 64


class RankWatch:
    """Looks once a second, and whenever a rank sends a message."""

    def __init__(
        self, folder: Path, place: LaunchedRank, door: socket.socket, clock: Clock
    ) -> None:
        self.events: asyncio.Queue[FoundPage | WardenEvent] = asyncio.Queue()
        """The events, in order."""
        self.ranks = RoundWatch(self.events)  # type: ignore[arg-type]  # it only puts
        self._oldest = 0
        """The newest round: pages of earlier rounds are ignored."""
        self._finder = PageFinder(folder)
        self._place = place
        self._door = door
        self._clock = clock
        self._handles: dict[int, FoundPage] = {}
        self._due = asyncio.Event()
        self._launcher: int | None = None

    async def watch_for_ever(self) -> None:
        """Watch until cancelled."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._door, self._hear)
        try:
            while True:
                self._due.clear()
                pages = await asyncio.to_thread(self._finder.look, self._oldest)
                self._notice_gone()  # ranks of the round before are gone before the next begins
                for page in pages:
                    self.events.put_nowait(page)
                await self.events.join()
                self.ranks.look(self._clock.now())
                if pages:
                    continue
                try:
                    async with asyncio.timeout(_LOOK_EVERY_S):
                        await self._due.wait()
                except TimeoutError:
                    continue
        finally:
            loop.remove_reader(self._door)
            for handle in list(self._handles):
                self._forget(handle)
            if self._launcher is not None:
                os.close(self._launcher)

    @property
    def launcher_lives(self) -> bool:
        """The launcher lives, and may start the ranks again."""
        return self._launcher is not None and not is_over(self._launcher)

    def begins(self, number: int, now: float) -> None:
        """A round begins: ignore pages of earlier rounds."""
        self._oldest = number
        self.ranks.begin(number, now)

    def add(self, new: FoundPage) -> None:
        """Watch a rank of the present round."""
        now = self._clock.now()
        if not self.launcher_lives:
            self._find_launcher(new.pid)
        self.ranks.add(new.rank, new.folder, new.page)
        line = Spawned(round=new.round, rank=new.rank, pid=new.pid, start="cold")
        self.ranks.spawned(line, now)
        self.ranks.look(now)
        try:
            handle = os.pidfd_open(new.pid)
        except OSError:
            self._gone(new, None, None)
            return
        self._handles[handle] = new
        asyncio.get_running_loop().add_reader(handle, self._ended, handle)

    def _hear(self) -> None:
        for _ in range(_AT_ONCE):  # a rank may send without end: the loop has other work
            try:
                octets = self._door.recv(_LARGEST_DATAGRAM)
            except BlockingIOError:
                break
            self.ranks.on_datagram(octets, self._clock.now())
        self._due.set()

    def _notice_gone(self) -> None:
        for handle in list(self._handles):
            if is_over(handle):
                self._ended(handle)

    def _find_launcher(self, pid: int) -> None:
        launcher = launcher_of(pid, self._place)
        if self._launcher is not None:
            os.close(self._launcher)
        try:
            self._launcher = os.pidfd_open(launcher)
        except OSError:
            self._launcher = None  # it is gone, or there is none

    def _ended(self, handle: int) -> None:
        if handle not in self._handles:
            return
        ended = self._handles[handle]
        code, number = ending_of(ended.pid, handle)
        self._forget(handle)
        self._gone(ended, code, number)

    def _forget(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        del self._handles[handle]

    def _gone(self, gone: FoundPage, code: int | None, number: int | None) -> None:
        watched = self.ranks.rank(gone.rank)
        page = None if watched is None else watched.reading()
        lasted_s = 0.0 if page is None else max(0.0, self._clock.now() - page.script_s)
        line = Gone(
            round=gone.round,
            rank=gone.rank,
            pid=gone.pid,
            code=code,
            signal=number,
            core_dumped=False,
            lasted_s=round(lasted_s, 3),
        )
        self.ranks.gone(line, self._clock.now())
