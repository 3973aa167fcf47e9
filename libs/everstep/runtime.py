"""The life of a process: it runs whole or not at all, stops in order, and reports why."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from prometheus_client.registry import Collector

from everstep.errors import EverstepError
from everstep.observe.health import Check
from everstep.observe.metrics import Statistics
from everstep.observe.printable import printable
from everstep.observe.redaction import redact

Loop = Callable[[], Awaitable[None]]
"""Runs until it is cancelled. Returning is a bug."""
Drain = Callable[[asyncio.Event], Awaitable[None]]
"""A loop that finishes by itself soon after the event is set, and not before."""
Main = Callable[[asyncio.Event], Awaitable[None]]

_COLLECT_AFTER = (10_000, 20, 10)
"""How many new objects, and how many collections of the younger, start a collection."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The loops, checks and metrics of an open service, for the process that runs it."""

    loops: tuple[Loop, ...] = ()
    drains: tuple[Drain, ...] = ()
    checks: Mapping[str, Check] = field(default_factory=dict)
    """The checks that `/healthz` runs."""
    statistics: Mapping[str, Statistics] = field(default_factory=dict)
    """The counts that `/metrics` shows, by component."""
    collectors: tuple[Collector, ...] = ()
    """Further metrics of `/metrics`, with labels."""


class LoopEndedError(RuntimeError):
    """A loop of a service returned although the process was not asked to stop."""


class DrainTimeoutError(EverstepError):
    """A drain did not finish within its bound, and was cut off."""

    def __init__(self, names: Sequence[str], within_s: float) -> None:
        super().__init__(
            f"{', '.join(names)} did not finish within {within_s:g} s of the stop and "
            f"was cut off; what it had not acknowledged will be done again"
        )
        self.names = tuple(names)


class _StopRequested(Exception):  # noqa: N818  not an error: it ends the task group
    """The process was asked to stop. Never leaves this module."""


async def serve(
    *loops: Loop, stop: asyncio.Event, drains: Sequence[Drain] = (), drain_within_s: float = 10.0
) -> None:
    """Run every loop until `stop` is set.

    One loop failing, or returning, cancels the others and the error reaches the caller in an
    exception group: half a service looks healthy to its supervisor. On `stop`, `drains` have
    `drain_within_s` to return, while `loops` still serve them; then `loops` are cancelled.
    Raises `DrainTimeoutError` when a drain had to be cut off.
    """
    try:
        async with asyncio.TaskGroup() as tasks:
            draining = [
                tasks.create_task(_until_drained(drain, stop), name=_name(drain))
                for drain in drains
            ]
            for loop in loops:
                tasks.create_task(_for_ever(loop), name=_name(loop))
            tasks.create_task(_until_stopped(stop, draining, drain_within_s), name="stop")
    except* _StopRequested:
        pass


def run(name: str, main: Main, *, stop_within_s: float = 30.0) -> int:
    """Run a process to its end and return its exit code.

    SIGINT and SIGTERM set the event that `main` gets, and 0 is returned when `main` then
    returns. A second signal ends the process at once with 128 + its number; so does, with
    code 1 and the stack of every thread, a `main` that has not returned `stop_within_s` after
    the first. An `EverstepError` is one line for the operator and 2; any other error is a bug:
    its traceback and 1.
    """
    try:
        with _signals(stop_within_s) as attach, asyncio.Runner() as runner:
            runner.run(_attached(main, attach))
    except EverstepError as error:
        return say(name, error)
    except BaseExceptionGroup as group:
        errors = list(_leaves(group))
        if not all(isinstance(error, EverstepError) for error in errors):
            traceback.print_exception(group)
            return 1
        for line in dict.fromkeys(one_line(error) for error in errors):
            sys.stderr.write(f"{name}: {line}\n")
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:  # noqa: BLE001  the top of the process: everything ends here, and is shown
        traceback.print_exc()
        return 1
    return 0


def keep_what_is_loaded() -> None:
    """Take modules and parts that stay until the end out of the garbage collector's sight.

    A full collection otherwise looks at all of them again, and answers wait for it: 0.1 s for
    history's 200 000 objects.
    """
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def say(name: str, error: EverstepError) -> int:
    """Print an error as one line for the operator, and return its exit code."""
    sys.stderr.write(f"{name}: {one_line(error)}\n")
    return 2


def one_line(error: BaseException) -> str:
    """The text of an error, without line breaks and without secrets."""
    return printable(redact(" ".join(str(error).split()))) or type(error).__name__


async def _for_ever(loop: Loop) -> None:
    await loop()
    raise LoopEndedError(f"{_name(loop)} returned; a loop of a service must not")


async def _until_drained(drain: Drain, stop: asyncio.Event) -> None:
    await drain(stop)
    if not stop.is_set():
        raise LoopEndedError(f"{_name(drain)} returned before it was asked to stop")


async def _until_stopped(
    stop: asyncio.Event, draining: Sequence[asyncio.Task[None]], drain_within_s: float
) -> None:
    await stop.wait()
    if draining:
        _, late = await asyncio.wait(draining, timeout=drain_within_s)
        if late:
            names = sorted(task.get_name() for task in late)
            raise DrainTimeoutError(names, drain_within_s)
    raise _StopRequested


async def _attached(main: Main, attach: Callable[[asyncio.Event], None]) -> None:
    stop = asyncio.Event()
    attach(stop)
    await main(stop)


@contextlib.contextmanager
def _signals(stop_within_s: float) -> Generator[Callable[[asyncio.Event], None]]:
    """Handle SIGINT and SIGTERM inside the block; call what it yields on the loop."""
    # Not loop.add_signal_handler: it runs on the loop, so a blocked loop could not be stopped.
    seen: list[int] = []
    attached: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []

    def attach(stop: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        loop.add_reader(woken, woken.recv, 64)
        attached.append((loop, stop))
        if seen:
            stop.set()

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        if seen:
            os._exit(128 + number)
        seen.append(number)
        faulthandler.dump_traceback_later(stop_within_s, exit=True, file=sys.__stderr__ or 2)
        for loop, stop in attached:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the process ends
                loop.call_soon_threadsafe(stop.set)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        with _woken_by_signals() as woken:
            yield attach
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _woken_by_signals() -> Generator[socket.socket]:
    """A socket that becomes readable at a signal: Python calls no handler while a loop waits."""
    woken, waking = socket.socketpair()
    with woken, waking:
        for item in (woken, waking):
            item.setblocking(False)  # noqa: FBT003  it takes no keyword
        before = signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
        try:
            yield woken
        finally:
            signal.set_wakeup_fd(before)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _name(loop: Callable[..., object]) -> str:
    return getattr(loop, "__qualname__", repr(loop))
