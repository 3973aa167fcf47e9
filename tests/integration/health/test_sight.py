"""What an observer says of its own blindness, and of stalls: its loops, on a bus in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everstep import ids, subjects
from everstep.messages import (
    BeatNow,
    Fact,
    NodeBeat,
    NodeLost,
    ObserverBlinded,
    RankBeat,
    RankRecovered,
    RankStalled,
    StallLocated,
)
from everstep.messages.codec import decode
from everstep_services.health.replica import HealthReplica
from everstep_services.health.settings import HealthSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock


class World:
    """Three nodes with a rank each, and one observer."""

    def __init__(self) -> None:
        self.server, self.clock = MemoryServer(), FakeClock()
        self.bus = MemoryBus(self.server)
        self.health = HealthReplica(HealthSettings(), self.bus, self.clock)
        self.stopped: dict[int, float] = {}
        self.silent: set[int] = set()
        self._sequence = 0

    async def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self._sequence += 1
            for rank in {0, 1, 2} - self.silent:
                self.bus.send(subjects.beat("j", f"n{rank}"), self.beat(rank))
            for _ in range(4):
                await self.clock.advance(0.25)

    def beat(self, rank: int) -> NodeBeat:
        now = self.clock.now()
        age_s = max(0.01, now - self.stopped.get(rank, now))
        return NodeBeat(
            job="j",
            node=f"n{rank}",
            sequence=self._sequence,
            at=self.clock.wall(),
            state="running",
            round=1,
            slot=rank,
            ranks=(RankBeat(rank=rank, step=7, progress_age_s=age_s, section="data"),),
        )

    def about(self, rank: int) -> dict[str, object]:
        return {
            "id": ids.new_id(),
            "job": "j",
            "at": self.clock.wall(),
            "source": "agent",
            "round": 1,
            "node": f"n{rank}",
            "slot": rank,
            "rank": rank,
            "local_rank": 0,
        }

    async def stall(self, rank: int) -> None:
        """Its agent says that it has stalled."""
        stalled = RankStalled(
            **self.about(rank),  # type: ignore[arg-type]
            waited_s=self.clock.now() - self.stopped[rank],
            limit_s=5.0,
            limit_source="learned",
            phase="section",
            section="data",
            step=7,
            is_waiting_for_ranks=False,
        )
        await self.bus.record(stalled)

    def said(self, of: type[Fact]) -> list[Fact]:
        facts = [decode(one.data) for one in self.server.facts]
        return [fact for fact in facts if isinstance(fact, of)]


@asynccontextmanager
async def watched() -> AsyncIterator[World]:
    world = World()
    observer = world.health.observer
    async with asyncio.TaskGroup() as tasks:
        loops = [
            tasks.create_task(loop())
            for loop in (
                world.health.ids.keep_for_ever,
                observer.hear_for_ever,
                observer.follow_stalls_for_ever,
                observer.follow_recoveries_for_ever,
                observer.judge_for_ever,
                world.health.records.record_for_ever,
            )
        ]
        yield world
        for loop in loops:
            loop.cancel()


async def test_an_observer_that_was_blind_says_so_afterwards() -> None:
    async with watched() as world:
        await world.run(5)
        await world.server.set_up(False)
        await world.run(10)
        assert world.said(ObserverBlinded) == []
        await world.server.set_up(True)
        await world.run(10)
        (fact,) = world.said(ObserverBlinded)
    assert isinstance(fact, ObserverBlinded)
    assert 9.5 <= fact.blind_s <= 10.5
    assert (fact.job, fact.reason) == (subjects.CLUSTER, "the bus was away")


async def test_a_moment_of_blindness_is_not_worth_a_fact() -> None:
    async with watched() as world:
        await world.run(5)
        await world.server.set_up(False)
        await world.run(2)
        await world.server.set_up(True)
        await world.run(5)
        assert world.said(ObserverBlinded) == []


async def test_a_node_that_nobody_hears_is_lost_though_the_others_train_on() -> None:
    async with watched() as world:
        await world.run(5)
        world.silent = {1}
        async with world.bus.subscribe(subjects.hail("j", "n1"), BeatNow):
            await world.run(30)
            assert world.said(NodeLost) == [], "somebody hears what it is asked"
        await world.run(2)
        world.silent = set()
        await world.run(5)
        world.silent = {1}
        await world.run(15)
        (fact,) = world.said(NodeLost)
    assert isinstance(fact, NodeLost)
    assert (fact.node, fact.slot, fact.limit_s) == ("n1", 1, 11.75)
    assert "its connection to the bus closed after its last beat" in fact.reason


async def test_a_stall_is_located_and_a_second_one_again() -> None:
    """Two stalls of one rank are two facts (A3.4)."""
    async with watched() as world, world.bus.subscribe(subjects.lost("j"), StallLocated) as heard:
        for number in (1, 2):
            await world.run(5)
            now = world.clock.now()
            world.stopped = {0: now + 1, 1: now, 2: now + 1}
            await world.run(6)
            await world.stall(1)
            await world.run(3)
            assert len(world.said(StallLocated)) == number
            world.stopped.clear()
            back = RankRecovered(**world.about(1), stalled_s=9.0, stall="")  # type: ignore[arg-type]
            await world.bus.record(back)
        found = world.said(StallLocated)
        assert [await anext(heard) for _ in found] == found, "rendezvous is told, too"
    for fact in found:
        assert isinstance(fact, StallLocated)
        assert (fact.first_ranks, fact.nodes, fact.section) == ((1,), ("n1",), "data")
        assert (fact.waiting_ranks, fact.is_certain, fact.round) == (2, True, 1)
