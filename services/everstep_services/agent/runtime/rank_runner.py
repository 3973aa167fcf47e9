"""Has the keeper start, signal and stop ranks, one after the other, and gets another if need be."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, replace

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep_services.agent.core.actions import Forward, Hurry, Start, Stop
from everstep_services.agent.ranks.device_memory import wait_until_free
from everstep_services.agent.ranks.protocol import KeeperEvent, KeeperLost, KeeperLostError, Stopped
from everstep_services.agent.ranks.warden_client import Keeper
from everstep_services.agent.runtime.workdir import Workplace

log = logging.getLogger(__name__)

_AGAIN_AFTER_S = 1.0
_KEEPER_WITHIN_S = 30.0
_DEVICES_WITHIN_S = 50.0
_HEARD_WITHIN_S = 10.0
_NOTHING = Stopped((), (), 0, (), 0.0)


@dataclass(frozen=True, slots=True)
class Keepers:
    """The keeper that runs already, and how to get another when it is lost."""

    first: Keeper
    close_first: Callable[[], Awaitable[None]]
    another: Callable[[], AbstractAsyncContextManager[Keeper]]


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told what came of the work."""

    begins: Callable[[Start], bool]
    """This is about to be started; False when it is no longer wanted."""
    failed: Callable[[Start, str], None]
    stops: Callable[[Stop], Awaitable[None]]
    """Its ranks are about to be stopped: learn what can be learned of them."""
    stopped: Callable[[Stop, Stopped], None]


class Work:
    """The ranks of this node, as far as they are to be started, signalled and stopped."""

    def __init__(self, keepers: Keepers, workplace: Workplace, clock: Clock, told: Told) -> None:
        self.keeper = keepers.first
        self._keepers = keepers
        self._has_keeper = asyncio.Event()
        self._has_keeper.set()
        self._workplace = workplace
        self._clock = clock
        self._told = told
        self._rounds: asyncio.Queue[Start | Stop] = asyncio.Queue()
        self._need_not_wait = asyncio.Event()
        """No script is left that might end by itself, or the cause is known."""
        self._signals: asyncio.Queue[Forward] = asyncio.Queue()

    def do(self, act: Start | Stop | Hurry | Forward) -> None:
        """Start or stop the ranks of a round, when what was asked for before is done.

        A signal is sent whatever else is being done.
        """
        match act:
            case Forward():
                self._signals.put_nowait(act)
            case Hurry():
                self._need_not_wait.set()
            case Stop():
                self._need_not_wait.clear()
                self._rounds.put_nowait(act)
            case Start():
                self._rounds.put_nowait(act)

    async def events(self) -> AsyncIterator[KeeperEvent]:
        """What happens to the ranks, through all keepers."""
        async for event in self._heard():
            yield event
        await self._keepers.close_first()
        while True:
            async with self._keepers.another() as self.keeper:
                self._has_keeper.set()
                async for event in self._heard():
                    yield event
            await self._clock.sleep(_AGAIN_AFTER_S)

    async def start_and_stop_for_ever(self) -> None:
        while True:
            match await self._rounds.get():
                case Start() as start:
                    if self._told.begins(start):
                        await self._start(start)
                case Stop() as stop:
                    await self._stop(stop)

    async def signal_for_ever(self) -> None:
        while True:
            act = await self._signals.get()
            try:
                unmoved = await self.keeper.signal(
                    act.number, act.ranks, to_handlers=act.to_handlers
                )
            except (EverstepError, TimeoutError) as error:
                log.warning("signal_not_sent signal=%d error=%s", act.number, error)
                continue
            if unmoved:
                name, ranks = signal.Signals(act.number).name, ", ".join(map(str, unmoved))
                self._workplace.say(f"{name} is kept from ranks {ranks}: they do not handle it")

    async def _heard(self) -> AsyncIterator[KeeperEvent]:
        """Until the keeper is lost."""
        while True:
            event = await self.keeper.events.get()
            is_over = isinstance(event, KeeperLost)
            if is_over:
                self._has_keeper.clear()
            try:
                yield event
            finally:
                self.keeper.events.task_done()
            if not self.keeper.watch.are_at_work:
                self._need_not_wait.set()
            if is_over:
                return

    async def _start(self, start: Start) -> None:
        try:
            async with asyncio.timeout(_KEEPER_WITHIN_S):
                await self._has_keeper.wait()
            batch = await asyncio.to_thread(self._workplace.prepare, start.order)
            await self.keeper.start(batch)
        except (OSError, TimeoutError, EverstepError) as error:
            self._told.failed(start, f"its ranks cannot be started: {error}")
        else:
            self._workplace.show(start.order)

    async def _wait(self, stop: Stop) -> float:
        """Until the ranks may be stopped; how much longer than the evidence took."""
        began = self._clock.now()
        await self._told.stops(stop)
        learned = self._clock.now()
        left_s = began + stop.wait_s - learned
        if left_s <= 0 or not self.keeper.watch.are_at_work:
            return 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._need_not_wait.wait()
        return self._clock.now() - learned

    async def _stop(self, stop: Stop) -> None:
        waited_s = await self._wait(stop)
        pids = self.keeper.watch.pids()
        keeper = self.keeper
        try:
            outcome = await keeper.stop(stop.grace_s, is_done=stop.is_done)
            # What ended before it was stopped may be why: it is heard first.
            async with asyncio.timeout(_HEARD_WITHIN_S):
                await keeper.events.join()
        except KeeperLostError:
            outcome = _NOTHING  # nothing outlives its warden
        except TimeoutError:
            log.warning("events_left count=%d", keeper.events.qsize())
        devices = await wait_until_free(pids, _DEVICES_WITHIN_S, self._clock)
        outcome = replace(outcome, stop_s=outcome.stop_s + waited_s, devices=devices)
        self._told.stopped(stop, outcome)
        self._workplace.hide()
