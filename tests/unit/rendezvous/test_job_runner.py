"""A job runner and its bus: what it knew before the bus was away, it forgets before it decides."""

import asyncio

from everstep.clock import SystemClock
from everstep_services.rendezvous.domain.events import JobControl
from everstep_services.rendezvous.job_runner import JobRunner, ReplicaContext
from everstep_services.rendezvous.settings import RendezvousSettings
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.rendezvous.world import World, spec


async def test_a_desk_that_wakes_first_when_the_bus_is_back_forgets_all_the_same() -> None:
    server = MemoryServer()
    join = World(spec(1)).ask("a")
    async with asyncio.TaskGroup() as tasks:
        around = ReplicaContext(
            RendezvousSettings(), MemoryBus(server), SystemClock(), lambda _: JobControl(), tasks
        )
        runner = JobRunner("j", around)
        working = tasks.create_task(runner.work_for_ever())
        await runner.ask(join)
        before = runner._memory
        await runner.ask(join)
        assert runner._memory is before
        await server.set_up(up=False)
        asked = tasks.create_task(runner.ask(join))  # nobody else tells it that the bus was away
        await server.set_up(up=True)
        await asked
        assert runner._memory is not before
        working.cancel()
