"""Shows the ranks' output: whole lines, each with its node and rank, at the reader's pace.

A thread of its own follows the files, so the terminal never delays the agent, and memory stays
bounded: the files are the queue. When it falls behind, it skips, and says how much.
"""

import asyncio
import logging
import os
import queue
import selectors
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from everstep_services.agent.output.follower import Follower, Inotify, put
from everstep_services.agent.run_plan import ConsoleChoice, Std

log = logging.getLogger(__name__)

_PACE_S = 0.01
"""Changes gather for this long: a wake-up for each line would cost more than the lines."""
_LOOK_EVERY_S = 0.2
"""How often sizes are looked at if the kernel cannot report changes; otherwise once a second, for
changes that it may miss (on a file system of another host).
"""
_COLORS = (36, 33, 32, 35, 34, 31)
_LINES_MOST = 1000
_Request = Follower | Future[None] | Callable[[], None] | None


@dataclass(frozen=True, slots=True)
class Rank:
    """A rank, and the folder of its output."""

    rank: int
    local_rank: int
    folder: Path
    starts: tuple[int, int] = (0, 0)
    """Where the output of this run begins in `stdout` and `stderr`."""
    role: str = "default"
    is_alone: bool = False
    """It is the only rank of its world."""


@dataclass(frozen=True, slots=True)
class Screen:
    """The target of lines, and whether it is a terminal with colours."""

    descriptor: int
    is_colored: bool = False


class Console:
    """Made by `opened_console`. No method waits for the terminal."""

    def __init__(self, node: str, choice: ConsoleChoice, screens: tuple[Screen, Screen]) -> None:
        self._node = node
        self._choice = choice
        self._screens = screens
        self._asked: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        # A daemon: a terminal that takes nothing must not keep the process alive.
        self._thread = threading.Thread(
            target=_Showing(self._asked, os.dup(self._bell)).run, name="console", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def say(self, line: str) -> None:
        """Show a line of the agent's own; those that a terminal takes too late are left out."""
        if self._asked.qsize() < _LINES_MOST:
            text = f"{line}\n".encode("utf-8", "replace")
            self._ask(partial(put, self._screens[1].descriptor, text))

    def follow(self, rank: Rank) -> None:
        """Show the output of this rank from now on, as far as it was chosen. Its files exist."""
        shown = self._choice.shows(rank.rank, rank.local_rank)
        streams = ((Std.OUT, "stdout"), (Std.ERR, "stderr"))
        for (std, name), start, screen in zip(streams, rank.starts, self._screens, strict=True):
            if shown & std:
                prefix, label = self._prefix(rank, screen)
                path = rank.folder / name
                follower = Follower(
                    path, start, screen.descriptor, prefix, label, is_alone=rank.is_alone
                )
                self._ask(follower)

    def release(self) -> "Future[None]":
        """The same as `drain`, without waiting for it."""
        done: Future[None] = Future()
        self._ask(done)
        return done

    async def drain(self, within_s: float) -> bool:
        """Show everything written until now, and stop following those ranks.

        False when the terminal did not take it in time; it still shows the rest later.
        """
        done = self.release()
        try:
            async with asyncio.timeout(within_s):
                await asyncio.wrap_future(done)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Show no more. Does not wait for a write that the terminal delays."""
        self._ask(None)
        os.close(self._bell)  # the thread has one of its own

    def _ask(self, request: "_Request") -> None:
        self._asked.put(request)
        os.eventfd_write(self._bell, 1)

    def _prefix(self, rank: Rank, screen: Screen) -> tuple[bytes, str]:
        """The prefix of a line, and the name of the rank in a note of our own."""
        label = f"{self._node}:{rank.rank}"
        if self._choice.prefix is None:
            return b"", label
        text = self._choice.prefix
        for name, value in {
            "node": self._node,
            "rank": rank.rank,
            "local_rank": rank.local_rank,
            "role_name": rank.role,
        }.items():
            text = text.replace(f"${{{name}}}", str(value))
        if screen.is_colored and self._choice.is_colored:
            text = f"\x1b[{_COLORS[rank.rank % len(_COLORS)]}m{text}\x1b[0m"
        return text.encode("utf-8", "replace"), label


@asynccontextmanager
async def opened_console(
    node: str, choice: ConsoleChoice, screens: tuple[Screen, Screen]
) -> AsyncIterator[Console]:
    """A console that shows lines on these two screens: for stdout and stderr."""
    console = Console(node, choice, screens)
    console.start()
    try:
        yield console
    finally:
        console.close()


class _Showing:
    """The thread: waits for changes and shows them."""

    def __init__(self, asked: "queue.SimpleQueue[_Request]", bell: int) -> None:
        self._asked = asked
        self._bell = bell
        self._followed: dict[int, Follower] = {}
        self._unfinished: set[int] = set()
        """Files with more to show at once."""
        self._inotify = _inotify()
        self._selector = selectors.DefaultSelector()
        self._next = -1

    def run(self) -> None:
        self._selector.register(self._bell, selectors.EVENT_READ)
        if self._inotify is not None:
            self._selector.register(self._inotify.descriptor, selectors.EVENT_READ)
        try:
            while self._turn():
                pass
        finally:
            self._forget()
            self._selector.close()
            os.close(self._bell)
            if self._inotify is not None:
                self._inotify.close()

    def _turn(self) -> bool:
        every_s = _LOOK_EVERY_S if self._inotify is None else 1.0
        if any(follower.may_ask for follower in self._followed.values()):
            every_s = _LOOK_EVERY_S
        idle_s = 0.0 if self._unfinished else every_s if self._followed else None
        woken = self._selector.select(idle_s)
        for key, _ in woken:
            if key.fd == self._bell:
                os.eventfd_read(self._bell)
        if not self._obey():
            return False
        changed = self._inotify.changed() if self._inotify is not None and woken else None
        if not woken and self._unfinished:
            changed = set()
        self._show_some(changed)
        for follower in self._followed.values():
            follower.show_question()
        if woken and not self._unfinished:
            time.sleep(_PACE_S)
        return True

    def _show_some(self, changed: set[int] | None) -> None:
        """Show a part of each file with new output: no rank waits for all of another's."""
        numbers = set(self._followed) if changed is None else changed | self._unfinished
        self._unfinished = {
            number
            for number in numbers
            if number in self._followed and self._followed[number].show_some()
        }

    def _show_all(self) -> None:
        """Show what is there now, and no more: a rank may still write."""
        waiting = [(follower, follower.size()) for follower in self._followed.values()]
        while waiting:
            waiting = [(follower, size) for follower, size in waiting if follower.show_some(size)]

    def _obey(self) -> bool:
        """Do what the agent asked for; False when that was to end."""
        while True:
            try:
                asked = self._asked.get_nowait()
            except queue.Empty:
                return True
            if asked is None:
                return False
            if isinstance(asked, Follower):
                self._begin(asked)
            elif callable(asked):
                asked()
            else:
                self._show_all()
                self._forget()
                if asked.set_running_or_notify_cancel():
                    asked.set_result(None)

    def _begin(self, follower: Follower) -> None:
        if not follower.open():
            return
        number = self._next
        self._next -= 1
        if self._inotify is not None:
            try:
                number = self._inotify.watch(follower.path)
            except OSError as error:
                log.warning("console_watch_failed path=%s error=%s", follower.path, error)
        self._followed[number] = follower
        self._unfinished.add(number)  # written before it was watched

    def _forget(self) -> None:
        for number, follower in self._followed.items():
            follower.close()
            if self._inotify is not None and number >= 0:
                self._inotify.unwatch(number)
        self._followed.clear()
        self._unfinished.clear()


def _inotify() -> Inotify | None:
    try:
        return Inotify()
    except OSError as error:
        log.warning("console_looks_for_changes every_s=%g error=%s", _LOOK_EVERY_S, error)
        return None
