"""The agent's work with its warden: what it hears before it says that a round was stopped."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from everstep.clock import SystemClock
from everstep.messages import StartRanks
from everstep_services.agent.core.actions import (
    Action,
    EndParked,
    SendReport,
    StopRound,
    StopWithoutWait,
)
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.core.exit import WARDEN_ENDED
from everstep_services.agent.ranks.device_memory import HeldMemory
from everstep_services.agent.ranks.protocol import (
    RankGone,
    WardenEvent,
    WardenLost,
    WardenLostError,
)
from everstep_services.agent.runtime.rank_events import RankEvents
from everstep_services.agent.runtime.rank_runner import RankRunner, WardenClients
from everstep_services.agent.settings import AgentSettings
from tests.unit.agent.orders import start, stop
from trainer_sdk.wire import AllStopped, ForgeUp

GONE = RankGone(1, 0, 7, 1, None, False, 2.0)


class Kept:
    """A warden whose rank has ended by itself, and which has then stopped the others."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[WardenEvent] = asyncio.Queue()
        self.watch = self
        self.are_at_work = False

    def pids(self) -> dict[int, int]:
        return {}

    async def start(self, _batch: object) -> None:
        self.are_at_work = True

    async def stop(
        self, _grace_s: float, *, is_done: bool, keeps: tuple[int, ...], is_planned: bool
    ) -> AllStopped:
        assert not is_done
        assert not keeps
        assert not is_planned
        self.events.put_nowait(GONE)
        return AllStopped(ranks=(1,), killed=(), swept=0, left=(), stop_s=0.1)


class Loss(asyncio.Event):
    """The loss of a warden; `is_awaited` once somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.is_awaited.set()
        return await super().wait()


class Killed(Kept):
    """A warden that was killed, which its agent has not noticed yet."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = Loss()

    async def stop(
        self, _grace_s: float, *, is_done: bool, keeps: tuple[int, ...], is_planned: bool
    ) -> AllStopped:
        raise WardenLostError("broken pipe")


class Place:
    leaves_children = False

    def prepare(self, order: object) -> object:
        return order

    def show(self, order: object) -> None:
        """Nothing is shown."""

    def hide(self) -> None:
        """Nothing was shown."""


async def _at_once() -> None:
    """No evidence is being collected."""


class Stopping(RankEvents):
    """A round is stopped: what happens."""

    def __init__(self, warden: Kept | None = None) -> None:
        self.kept = warden or Kept()
        self.happened: list[str] = []
        self.learned = asyncio.Event()
        self.heard, self.may_end, self.over = asyncio.Event(), asyncio.Event(), asyncio.Event()
        wardens = WardenClients(cast("Any", self.kept), self._close, cast("Any", None))
        place, clock, nobody = cast("Any", Place()), SystemClock(), cast("Any", None)
        self.work = RankRunner(wardens, place, clock)
        observers = cast("Any", SimpleNamespace(collection=SimpleNamespace(of_kept=_at_once)))
        super().__init__(self.work, place, clock, nobody, nobody, observers)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [
            asyncio.create_task(self._listen()),
            asyncio.create_task(self.start_and_stop_for_ever()),
        ]
        yield
        for task in tasks:
            task.cancel()

    async def _listen(self) -> None:
        async for event in self.work.events():
            self.heard.set()
            await self.may_end.wait()  # as its record of an exception is read
            self.happened.append(type(event).__name__)

    def round_begins(self, order: StartRanks) -> bool:
        return True

    def round_started(self, order: StartRanks) -> None:
        self.happened.append("started")

    async def round_stops(self, stop: StopRound) -> None:
        self.learned.set()

    def round_stopped(self, *_: object) -> None:
        self.happened.append("stopped")
        self.over.set()

    async def _close(self) -> None:
        """A lost warden has nothing to close here; no other one is opened."""
        await asyncio.Event().wait()


@asynccontextmanager
async def stopped_within(wait_s: float) -> AsyncIterator[Stopping]:
    """Ranks are at work, and may end by themselves for this long."""
    stopping = Stopping()
    stopping.kept.are_at_work = True
    stopping.may_end.set()
    async with stopping.running():
        stopping.work.do(StopRound(1, 3.0, 0.0, None, wait_s))
        yield stopping


async def test_whoever_ended_first_is_heard_before_the_round_is_over() -> None:
    """However long it takes to learn why."""
    stopping = Stopping()
    async with stopping.running():
        stopping.work.do(StopRound(1, 3.0, 0.0, None))
        await stopping.heard.wait()
        stopping.may_end.set()
        await stopping.over.wait()
    assert stopping.happened == ["RankGone", "stopped"]


async def test_the_loss_of_a_warden_is_heard_before_its_round_is_over() -> None:
    """Otherwise the next round is begun with the lost warden, and fails at once."""
    killed = Killed()
    stopping = Stopping(killed)
    stopping.may_end.set()
    async with stopping.running():
        stopping.work.do(StopRound(1, 3.0, 0.0, None))
        await asyncio.wait(
            [asyncio.ensure_future(it.wait()) for it in (killed.lost.is_awaited, stopping.over)],
            return_when=asyncio.FIRST_COMPLETED,
        )
        killed.events.put_nowait(WardenLost(f"{WARDEN_ENDED}it was killed by SIGKILL"))
        killed.lost.set()
        await stopping.over.wait()
    assert stopping.happened == ["WardenLost", "stopped"]


@pytest.mark.parametrize("why", ["the cause is known", "none is left"])
async def test_ranks_that_may_end_by_themselves_are_stopped_when_there_is_no_need_to_wait(
    why: str,
) -> None:
    async with stopped_within(3600.0) as stopping:
        await stopping.learned.wait()
        stopping.happened.append("waits")
        if why == "none is left":
            stopping.kept.are_at_work = False
            stopping.kept.events.put_nowait(GONE)
        else:
            stopping.work.do(StopWithoutWait())
        await stopping.over.wait()
    assert stopping.happened[0] == "waits"
    assert stopping.happened[-1] == "stopped"


async def test_ranks_that_are_being_started_have_that_time_too() -> None:
    """The order to stop comes before they have; an event of others ends no wait."""
    stopping = Stopping()
    stopping.may_end.set()
    stopping.work.do(start())
    stopping.work.do(StopRound(1, 3.0, 0.0, None, 3600.0))
    stopping.kept.events.put_nowait(ForgeUp(took_s=0.1, preloaded=()))
    async with stopping.running():
        await stopping.learned.wait()
        stopping.happened.append("waits")
        stopping.kept.are_at_work = False
        stopping.kept.events.put_nowait(GONE)
        await stopping.over.wait()
    assert stopping.happened == ["ForgeUp", "started", "waits", "RankGone", "RankGone", "stopped"]


async def test_they_are_stopped_when_their_time_is_over() -> None:
    async with stopped_within(0.01) as stopping:
        await stopping.over.wait()
    assert stopping.happened == ["RankGone", "stopped"]


class Parked(Kept):
    """A warden that parks rank 0, and has noted how it was asked to stop."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[float, tuple[int, ...]]] = []
        self.were_ended = asyncio.Event()

    def pids(self) -> dict[int, int]:
        return {0: 70, 1: 71}

    async def stop(
        self,
        grace_s: float,
        *,
        is_done: bool = False,
        keeps: tuple[int, ...] = (),
        is_planned: bool = False,
    ) -> AllStopped:
        assert not is_done
        assert not is_planned
        self.asked.append((grace_s, keeps))
        if not keeps:
            self.were_ended.set()
        return AllStopped(ranks=(1,), killed=(), swept=0, left=(), stop_s=0.1, kept=keeps)


class Devices:
    async def wait_until_free(
        self, pids: Collection[int], within_s: float, *, has_kept: bool
    ) -> HeldMemory:
        assert within_s > 0
        self.waited_for = (pids, has_kept)
        return HeldMemory()


async def test_a_parked_rank_keeps_its_memory_until_it_is_ended() -> None:
    parked, devices = Parked(), Devices()
    stopping = Stopping(parked)
    stopping.work._devices = cast("Any", devices)
    async with stopping.running():
        stopping.work.do(StopRound(1, 3.0, 0.0, None, keeps=(0,)))
        await stopping.over.wait()
        assert devices.waited_for == ([71], True)
        stopping.work.do(EndParked(5.0))
        await parked.were_ended.wait()
    assert parked.asked == [(3.0, (0,)), (5.0, ())]


class Ends:
    """The record of ends, and what the agent does about them."""

    def __init__(self, recorded: int) -> None:
        self.recorded = recorded
        self.kept: list[int] = []

    def fact_of(self, _round: int, rank: int) -> str | None:
        return "its-end" if rank == self.recorded else None

    def rank_exited(self, _order: StartRanks, rank: int, *_: object) -> None:
        self.kept.append(rank)

    def step(self, _rank: int) -> None:
        """No step is known."""

    def say(self, _text: str, *, is_warning: bool) -> None:
        assert is_warning


@pytest.mark.parametrize("is_stopping", [True, False])
async def test_the_end_of_a_warden_is_reported_although_its_round_is_being_stopped(
    *, is_stopping: bool
) -> None:
    """Other nodes lose their peers at that moment, and may be heard first."""
    ends, did = Ends(recorded=0), list[Action]()
    agent = Agent(AgentSettings())
    agent.ordered(start(1, ranks=3))
    if is_stopping:
        agent.ordered(stop(1))
    parts = SimpleNamespace(leaves_children=False, say=ends.say)
    observers = SimpleNamespace(progress=ends, evidence=ends)
    wardens = WardenClients(cast("Any", Kept()), cast("Any", None), cast("Any", None))
    place, clock = cast("Any", parts), SystemClock()
    runner = RankRunner(wardens, place, clock)
    events = RankEvents(runner, place, clock, agent, did.extend, cast("Any", observers))
    events._warden_lost(WardenLost(f"{WARDEN_ENDED}it was killed by SIGKILL"))
    assert ends.kept == [1, 2]
    assert [it.reason for it in did if isinstance(it, SendReport)] == [
        f"rank {rank} ended without a known exit code or signal: the warden of its node has ended: "
        "it was killed by SIGKILL"
        for rank in (1, 2)
    ]
