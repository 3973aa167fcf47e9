"""Sees ranks of another launcher come, hears their messages, and learns how they ended."""

import asyncio
import os
import socket

from everstep.clock import Clock
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.attached.page_finder import FoundPage, PageFinder
from everstep_services.agent.attached.process_end import ending_of, is_over
from everstep_services.agent.ranks.protocol import WardenEvent
from everstep_services.agent.ranks.round_watch import RoundWatch
from trainer_sdk.launchers import launcher_of
from trainer_sdk.wire import Gone, Spawned

_LOOK_EVERY_S = 1.0
_LARGEST_DATAGRAM = 1 << 16


class RankWatch:
    """Looks once a second, and whenever a rank sends a message."""

    def __init__(self, plan: AttachedPlan, door: socket.socket, clock: Clock) -> None:
        self.events: asyncio.Queue[FoundPage | WardenEvent] = asyncio.Queue()
        """The events, in order."""
        self.ranks = RoundWatch(self.events)  # type: ignore[arg-type]  # it only puts
        self.oldest = 0
        """The newest round: pages of earlier rounds are ignored."""
        self._finder = PageFinder(plan.folder)
        self._place = plan.place
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
                found = await asyncio.to_thread(self._finder.look, self.oldest)
                self._notice_gone()  # ranks of the round before are gone before the next begins
                for page in found:
                    self.events.put_nowait(page)
                await self.events.join()
                self.ranks.look(self._clock.now())
                if found:
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

    def add(self, found: FoundPage) -> None:
        """Watch a rank of the present round."""
        now = self._clock.now()
        if not self.launcher_lives:
            self._find_launcher(found.pid)
        self.ranks.add(found.rank, found.folder, found.page)
        line = Spawned(round=found.round, rank=found.rank, pid=found.pid, start="cold")
        self.ranks.spawned(line, now)
        self.ranks.look(now)
        try:
            handle = os.pidfd_open(found.pid)
        except OSError:
            self._gone(found, None, None)
            return
        self._handles[handle] = found
        asyncio.get_running_loop().add_reader(handle, self._ended, handle)

    def _hear(self) -> None:
        while True:
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
        found = self._handles[handle]
        code, number = ending_of(found.pid, handle)
        self._forget(handle)
        self._gone(found, code, number)

    def _forget(self, handle: int) -> None:
        asyncio.get_running_loop().remove_reader(handle)
        os.close(handle)
        del self._handles[handle]

    def _gone(self, found: FoundPage, code: int | None, number: int | None) -> None:
        known = self.ranks.rank(found.rank)
        page = None if known is None else known.reading()
        lasted_s = 0.0 if page is None else max(0.0, self._clock.now() - page.script_s)
        line = Gone(
            round=found.round,
            rank=found.rank,
            pid=found.pid,
            code=code,
            signal=number,
            core_dumped=False,
            lasted_s=round(lasted_s, 3),
        )
        self.ranks.gone(line, self._clock.now())
