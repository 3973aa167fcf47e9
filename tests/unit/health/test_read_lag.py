"""Health knows how far it has read of what is sent to it."""

import asyncio

from everstep import subjects
from everstep.messages import BeatNow
from everstep_services.health.observer import ReadLag
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.waiting import until_async


async def test_what_was_sent_before_a_word_that_came_back_has_been_read() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    echo = ReadLag(bus)
    assert echo.read_at(1.0) == 1.0, "nobody hears yet, so no word is missed"
    async with (
        bus.subscribe(subjects.hail(subjects.CLUSTER, None), BeatNow) as words,
        asyncio.TaskGroup() as tasks,
    ):
        hearing = tasks.create_task(echo.hear_for_ever())
        await until_async(lambda: echo.read_at(10.0) and words.received, "it says a word")
        assert echo.read_at(20.0) == 10.0
        await until_async(lambda: echo.read_at(20.0) == 20.0, "the word comes back")

        server.up = False
        heard = words.received
        assert [echo.read_at(at) for at in (30.0, 31.0)] == [20.0, 20.0]
        assert words.received == heard, "nothing comes back"
        server.up = True
        assert echo.read_at(32.0) == 20.0
        await until_async(lambda: echo.read_at(33.0) >= 32.0, "a later one is enough")

        heard = words.received
        assert echo.read_at(40.0) <= 33.0
        echo.forget()
        assert words.received > heard, "it comes back all the same"
        mine = server.inboxes[-1][1]
        await until_async(lambda: not mine._waiting, "and is taken out")
        assert echo.read_at(41.0) <= 33.0, "the bus was away: what it overtook may be lost"
        hearing.cancel()
