"""The agent's work with its keeper: what it hears before it says that a round was stopped."""

import asyncio
from typing import Any, cast

from everstep.clock import SystemClock
from everstep_services.agent.acts import Stop
from everstep_services.agent.ranks.keeping import KeeperEvent, RankGone, Stopped
from everstep_services.agent.work import Keepers, Told, Work

GONE = RankGone(1, 0, 7, 1, None, False, 2.0)


class Kept:
    """A keeper whose rank has ended by itself, and which has then stopped the others."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[KeeperEvent] = asyncio.Queue()
        self.watch = self

    def pids(self) -> tuple[int, ...]:
        return ()

    async def stop(self, _grace_s: float) -> Stopped:
        self.events.put_nowait(GONE)
        return Stopped((1,), (), 0, (), 0.1)


class Place:
    def hide(self) -> None:
        """Nothing was shown."""


async def test_whoever_ended_first_is_heard_before_the_round_is_over() -> None:
    """However long it takes to learn why."""
    happened: list[str] = []
    heard, may_end = asyncio.Event(), asyncio.Event()

    async def stops(_: Stop) -> None:
        """There is nothing to collect."""

    async def listen() -> None:
        async for event in work.events():
            heard.set()
            await may_end.wait()  # as its record of an exception is read
            happened.append(type(event).__name__)

    async def close() -> None:
        """Never called: it is not lost."""

    def stopped(*_: object) -> None:
        happened.append("stopped")
        over.set()

    over = asyncio.Event()
    keepers = Keepers(cast("Any", Kept()), close, cast("Any", None))
    told = Told(lambda _: True, lambda *_: None, stops, stopped)
    work = Work(keepers, cast("Any", Place()), SystemClock(), told)
    listening = asyncio.create_task(listen())
    working = asyncio.create_task(work.start_and_stop_for_ever())
    work.do(Stop(1, 3.0, 0.0, None))
    await heard.wait()
    may_end.set()
    await over.wait()
    assert happened == ["RankGone", "stopped"]
    for task in (listening, working):
        task.cancel()
