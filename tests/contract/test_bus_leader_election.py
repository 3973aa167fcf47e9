"""One of several replicas leads, and another one as soon as it does no longer."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from everstep.bus.errors import BusError
from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus
from tests.fakes.clock import NotedClock
from tests.waiting import until_async


@asynccontextmanager
async def leading(
    bus: Bus, lease: str, work: Callable[[Term], Awaitable[None]], clock: NotedClock
) -> AsyncIterator[None]:
    task = asyncio.create_task(lead_for_ever(bus, clock, lease, work))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_one_leads_and_another_one_once_its_work_fails(
    two: tuple[Bus, Bus], job: str
) -> None:
    led: list[str] = []
    over = asyncio.Event()

    async def first(_: Term) -> None:
        led.append("first")
        await over.wait()
        raise BusError("it cannot go on")

    async def second(_: Term) -> None:
        led.append("second")
        await asyncio.Event().wait()

    clocks = NotedClock(60.0), NotedClock(0.01)
    async with leading(two[0], job, first, clocks[0]):
        await until_async(lambda: led, "the first one leads")
        async with leading(two[1], job, second, clocks[1]):
            await until_async(lambda: len(clocks[1].waits) > 3, "the second one asks in vain")
            assert led == ["first"]
            over.set()
            await until_async(lambda: led, "the second one leads", holds=lambda all_: len(all_) > 1)
    assert led == ["first", "second"]
    assert clocks[0].waits == [2.0]


async def test_a_leader_whose_lease_is_gone_hears_it_and_tries_again(
    two: tuple[Bus, Bus], job: str
) -> None:
    terms: list[Term] = []

    class Hasty(NotedClock):
        """Enough time passes between two looks that it is always time to renew."""

        looks = itertools.count()

        def now(self) -> float:
            return super().now() + 10 * next(self.looks)

    async def work(term: Term) -> None:
        terms.append(term)
        while len(terms) == 1:
            await term.renew()
            await term.end()  # as if the server had forgotten it
        await asyncio.Event().wait()

    async with leading(two[0], job, work, Hasty(0.01)):
        await until_async(lambda: len(terms) == 2, "it leads again")
