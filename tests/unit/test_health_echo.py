"""Health notices that what is sent to it waits to be read."""

import asyncio

from everstep import subjects
from everstep.messages import BeatNow
from everstep_services.health.echo import Echo
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.waiting import until_async


async def test_a_word_that_does_not_come_back_is_late_until_one_does() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    echo = Echo(bus, within_s=0.25)
    assert not echo.is_late(0.0)
    assert not echo.is_late(10.0), "nobody hears yet"
    async with (
        bus.subscribe(subjects.hail(subjects.CLUSTER, None), BeatNow) as words,
        asyncio.TaskGroup() as tasks,
    ):
        hearing = tasks.create_task(echo.hear_for_ever())
        await until_async(lambda: echo.is_late(20.0) or words.received, "it says a word")
        server.up = False
        await until_async(
            lambda: not echo.is_late(30.0), "the word comes back, and another is said"
        )
        assert not echo.is_late(30.2)
        assert echo.is_late(30.3), "that one is on its way"
        echo.forget()
        assert not echo.is_late(40.0), "nothing is"
        assert echo.is_late(40.5)
        server.up = True
        assert echo.is_late(41.5), "it is said again, and has to come back"
        await until_async(lambda: not echo.is_late(41.6), "it does")
        hearing.cancel()
