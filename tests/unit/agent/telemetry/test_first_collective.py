"""When a round's first collective began, read from a recorder as torch's server shows it."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep_services.agent.core.actions import Action, SendReport
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.ranks.round_watch import WatchedRank
from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.telemetry.first_collective import FirstCollective
from tests.fakes.clock import FakeClock
from tests.unit.agent.orders import start, stop
from tests.unit.agent.stalls.stalled_ranks import Clock, StallRank, clock_of_pages
from tests.unit.agent.stalls.test_collectives import entry, trace
from tests.unit.worker_server import worker_server

ORDER = replace(start(2), restarts=1)


class Round:
    """A rank that was started again, its recorder, and what is reported of it."""

    def __init__(self, folder: Path, pages: Clock) -> None:
        self.pages = pages
        self.rank = rank = StallRank(folder, 0, pages)
        self.clock = FakeClock()
        self.began_s = self.clock.wall().timestamp()
        self.agent = Agent(AgentSettings())
        self.agent.ordered(ORDER)
        self.recorded = trace()
        self.asked = asyncio.Event()
        self.reported: asyncio.Queue[Action] = asyncio.Queue()
        self.watched = {0: WatchedRank(folder, rank.view_of_page)}
        self.first = FirstCollective(self.agent, self.watched.get, self.clock, self._do)

    def _do(self, acts: Sequence[Action]) -> None:
        for act in acts:
            self.reported.put_nowait(act)

    def answer(self) -> bytes:
        self.asked.set()
        return self.recorded

    async def next_round(self) -> None:
        """All that was told of the round before has been told once this one is."""
        self.agent.ordered(stop(2))
        self.agent.stopped(2)
        self.agent.ordered(replace(ORDER, round=3))
        self.recorded = trace(entry(0, self.began_s))
        self.first.begins(replace(ORDER, round=3))
        await self.look(600.0)
        told = await self.reported.get()
        assert isinstance(told, SendReport)
        assert told.round == 3

    async def look(self, seconds: float) -> None:
        self.asked.clear()
        await self.clock.advance(seconds)
        await self.asked.wait()


@asynccontextmanager
async def restarted(folder: Path) -> AsyncIterator[Round]:
    pages = Clock()
    with clock_of_pages(pages):
        of = Round(folder, pages)
        async with worker_server(folder, {"fr_trace_json": of.answer}):
            looks = asyncio.create_task(of.first.look_for_ever())
            of.first.begins(ORDER)
            yield of
            looks.cancel()
            with suppress(asyncio.CancelledError):
                await looks


async def test_it_is_reported_as_of_its_beginning(tmp_path: Path) -> None:
    async with restarted(tmp_path) as of:
        await of.look(0.5)
        at_s = of.began_s + 1.1
        of.recorded = trace(entry(1, at_s + 0.2), entry(0, at_s, retired=False))
        await of.look(1.0)
        told = await of.reported.get()
        assert isinstance(told, SendReport)
        assert (told.event, told.round) == ("first_collective", 2)
        assert told.last_progress_age_s == pytest.approx(0.4)


async def test_one_that_is_not_listed_any_more_is_not_guessed(tmp_path: Path) -> None:
    async with restarted(tmp_path) as of:
        of.recorded = trace(entry(7, of.began_s + 0.1))
        await of.look(0.5)
        await of.next_round()


async def test_ranks_whose_steps_are_counted_are_not_asked(tmp_path: Path) -> None:
    async with restarted(tmp_path) as of:
        of.rank.run.step()
        of.recorded = trace(entry(0, of.began_s))
        await of.clock.advance(600.0)
        (tmp_path / "3").mkdir()
        rank = StallRank(tmp_path / "3", 0, of.pages)
        of.watched[0] = WatchedRank(tmp_path, rank.view_of_page)
        await of.next_round()
