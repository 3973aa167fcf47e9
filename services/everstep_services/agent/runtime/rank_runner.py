"""Starts, signals and stops the ranks of this node through a warden, and replaces a lost warden."""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass

from msgspec.structs import replace

from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import SaveParked, StartRanks
from everstep_services.agent.core.actions import (
    EndParked,
    RankAction,
    SignalRanks,
    StopRound,
    StopWithoutWait,
)
from everstep_services.agent.ranks.device_memory import DeviceMemory, HeldMemory
from everstep_services.agent.ranks.protocol import WardenEvent, WardenLost, WardenLostError
from everstep_services.agent.ranks.warden_client import WardenClient
from everstep_services.agent.runtime.workdir import Workdir
from trainer_sdk.wire import AllStopped, SaveTogether

log = logging.getLogger(__name__)

_RoundAction = StartRanks | SaveParked | StopRound | EndParked
_AGAIN_AFTER_S = 1.0
_WARDEN_WITHIN_S = 30.0
_DEVICES_WITHIN_S = 50.0
_HEARD_WITHIN_S = 10.0
_NOTHING = AllStopped(ranks=(), killed=(), swept=0, left=(), stop_s=0.0)


@dataclass(frozen=True, slots=True)
class WardenClients:
    """The warden that runs already, and how to open another when it is lost."""

    first: WardenClient
    close_first: Callable[[], Awaitable[None]]
    another: Callable[[], AbstractAsyncContextManager[WardenClient]]


class RankRunner:
    """Carries out actions about the ranks of this node, one round after the other."""

    def __init__(self, wardens: WardenClients, workdir: Workdir, clock: Clock) -> None:
        self.warden = wardens.first
        self._wardens = wardens
        self._has_warden = asyncio.Event()
        self._has_warden.set()
        self._workdir = workdir
        self._clock = clock
        self._devices = DeviceMemory(clock)
        self._rounds: asyncio.Queue[_RoundAction] = asyncio.Queue()
        self._need_not_wait = asyncio.Event()
        """The cause is known, or no script is left that might end by itself."""
        self._signals: asyncio.Queue[SignalRanks] = asyncio.Queue()

    def do(self, act: RankAction) -> None:
        """Start or stop the ranks of a round after the previous action is done.

        A signal is sent in parallel with other actions.
        """
        match act:
            case SignalRanks():
                self._signals.put_nowait(act)
            case StopWithoutWait():
                self._need_not_wait.set()
            case StopRound():
                self._need_not_wait.clear()
                self._rounds.put_nowait(act)
            case StartRanks() | SaveParked() | EndParked():
                self._rounds.put_nowait(act)

    async def events(self) -> AsyncIterator[WardenEvent]:
        """The events of the ranks, from all wardens in turn."""
        async for event in self._heard():
            yield event
        await self._wardens.close_first()
        while True:
            async with self._wardens.another() as self.warden:
                self._has_warden.set()
                async for event in self._heard():
                    yield event
            await self._clock.sleep(_AGAIN_AFTER_S)

    async def next_round(self) -> "_RoundAction":
        """The next order to start ranks, to stop them, or for those that are parked."""
        return await self._rounds.get()

    async def signal_for_ever(self) -> None:
        while True:
            act = await self._signals.get()
            try:
                unmoved = await self.warden.signal(
                    act.number, act.ranks, to_handlers=act.to_handlers
                )
            except (EverstepError, TimeoutError) as error:
                log.warning("signal_not_sent signal=%d error=%s", act.number, error)
                continue
            if unmoved:
                name, ranks = signal.Signals(act.number).name, ", ".join(map(str, unmoved))
                self._workdir.say(f"{name} is kept from ranks {ranks}: they do not handle it")

    async def _heard(self) -> AsyncIterator[WardenEvent]:
        """The events of the present warden, until it is lost."""
        while True:
            event = await self.warden.events.get()
            is_over = isinstance(event, WardenLost)
            if is_over:
                self._has_warden.clear()
            try:
                yield event
            finally:
                self.warden.events.task_done()
            if not self.warden.watch.are_at_work and self._rounds.empty():
                self._need_not_wait.set()  # no start is under way, either
            if is_over:
                return

    async def start(self, order: StartRanks) -> str:
        """Start the ranks of a round; return why they cannot be started, or nothing."""
        try:
            async with asyncio.timeout(_WARDEN_WITHIN_S):
                await self._has_warden.wait()
            await self._devices.note_others()
            batch = await asyncio.to_thread(self._workdir.prepare, order)
            await self.warden.start(batch)
        except (OSError, TimeoutError, EverstepError) as error:
            return f"its ranks cannot be started: {error}"
        self._workdir.show(order)
        return ""

    async def wait_for_ends(self, within_s: float) -> float:
        """Let ranks end by themselves for this long; return the seconds that it took."""
        began = self._clock.now()
        if within_s <= 0 or not self.warden.watch.are_at_work:
            return 0.0
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._need_not_wait.wait()
        return self._clock.now() - began

    async def stop(self, stop: StopRound, waited_s: float) -> tuple[AllStopped, HeldMemory]:
        """Stop the ranks of a round; what they did before was heard when it returns.

        Returns the outcome, with the time of the wait before in it, and the accelerator memory that
        the ranks still seem to hold.
        """
        warden, outcome = self.warden, _NOTHING
        pids = warden.watch.pids()
        try:
            outcome = await warden.stop(
                stop.grace_s, is_done=stop.is_done, keeps=stop.keeps, is_planned=stop.is_planned
            )
            # A rank that ended before it was stopped may be the cause: its event is handled first.
            async with asyncio.timeout(_HEARD_WITHIN_S):
                await warden.events.join()
        except WardenLostError:  # nothing outlives its warden
            with suppress(TimeoutError):
                async with asyncio.timeout(_WARDEN_WITHIN_S):
                    # Its loss ended the ranks of this round, and none of the next.
                    await warden.lost.wait()
                    await warden.events.join()
        except TimeoutError:
            log.warning("events_left count=%d", warden.events.qsize())
        outcome = replace(outcome, stop_s=outcome.stop_s + waited_s)
        held = await self._devices.wait_until_free(
            [pid for rank, pid in pids.items() if rank not in outcome.kept],
            _DEVICES_WITHIN_S,
            has_kept=bool(outcome.kept),
        )
        return outcome, held

    async def save_parked(self, order: SaveParked) -> None:
        """Have the parked ranks save their states, within their time."""
        save = SaveTogether(
            rank=order.first_rank,
            world_size=order.world_size,
            master_address=order.master_address,
            master_port=order.master_port,
            within_s=order.within_s,
        )
        with suppress(WardenLostError):  # nothing outlives its warden
            await self.warden.stop(order.grace_s, save=save)

    async def end_parked(self, act: EndParked) -> None:
        """End the ranks that were parked for a round that does not come."""
        with suppress(WardenLostError):  # nothing outlives its warden
            await self.warden.stop(act.grace_s)
