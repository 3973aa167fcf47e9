"""Agents that join, obey and report like real ones, without any ranks."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from everstep import subjects
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus
from everstep.messages import (
    JobSpec,
    Join,
    Joined,
    LeaveJob,
    Order,
    Report,
    Reported,
    RoundDocument,
    ShowRound,
    StartRanks,
    StopRanks,
)
from tests.waiting import until_async

Heard = TypeVar("Heard", bound=Order)
WITHIN_S = 40.0


class Agent:
    """One agent of a job. What it hears it keeps; what it does the test decides."""

    def __init__(self, bus: Bus, job: str, node: str, spec: JobSpec) -> None:
        self.bus = bus
        self.job = job
        self.node = node
        self.spec = spec
        self.instance = f"{node}-1"
        self.orders: asyncio.Queue[Order] = asyncio.Queue()
        self.start: StartRanks | None = None
        self.last_round: int | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator["Agent"]:
        """Hear orders: to all, to the node, to this very agent."""
        async with asyncio.TaskGroup() as tasks:
            heard = [asyncio.Event() for _ in range(3)]
            listeners = [
                tasks.create_task(self._listen(subjects.order(self.job, name), ready))
                for name, ready in zip((None, self.node, self.instance), heard, strict=True)
            ]
            for ready in heard:
                await ready.wait()
            try:
                yield self
            finally:
                for listener in listeners:
                    listener.cancel()

    async def _listen(self, subject: str, ready: asyncio.Event) -> None:
        async with self.bus.subscribe(subject, Order) as orders:
            ready.set()
            async for order in orders:
                self.orders.put_nowait(order)

    async def join(self, **fields: Any) -> Joined:
        values: dict[str, Any] = {
            "job": self.job,
            "node": self.node,
            "instance": self.instance,
            "spec": self.spec,
            "allocation": "a",
            "address": "127.0.0.1",
            "ranks": self.spec.ranks_per_node,
            "last_round": self.last_round,
        }
        question = Join(**(values | fields))
        return await self.bus.ask(
            "rendezvous", "join", question, Joined, job=self.job, within_s=WITHIN_S
        )

    async def join_when_heard(self, **fields: Any) -> Joined:
        """As real agents do: ask again while nobody is there who answers."""
        return await until_async(lambda: self.join(**fields), "an answer", despite=BusError)

    async def report(self, event: str, **fields: Any) -> Reported:
        assert self.start is not None
        values: dict[str, Any] = {
            "job": self.job,
            "node": self.node,
            "instance": self.instance,
            "slot": self.start.slot,
            "round": self.start.round,
            "event": event,
            "reason": f"{self.node} {event}",
        }
        question = Report(**(values | fields))
        return await self.bus.ask(
            "rendezvous", "report", question, Reported, job=self.job, within_s=WITHIN_S
        )

    async def started(self, after: int = 0) -> StartRanks:
        """Wait for the order of a round after this one, and say that its ranks run."""
        async with asyncio.timeout(WITHIN_S):
            while True:
                order = await self.orders.get()
                if isinstance(order, StartRanks) and order.round > after:
                    break
        self.start = order
        await self.report("started")
        return order

    async def stopped(self) -> StopRanks:
        """Wait for the order to stop, and have no ranks any more."""
        async with asyncio.timeout(WITHIN_S):
            while not isinstance(order := await self.orders.get(), StopRanks):
                pass
        self.last_round = order.round
        return order

    async def heard(self, kind: type[Heard]) -> Heard:
        """Wait for an order of this kind."""
        async with asyncio.timeout(WITHIN_S):
            while not isinstance(order := await self.orders.get(), kind):
                pass
        return order

    async def sent_away(self) -> LeaveJob:
        async with asyncio.timeout(WITHIN_S):
            while not isinstance(order := await self.orders.get(), LeaveJob):
                pass
        return order

    async def show(self) -> RoundDocument:
        question = ShowRound(job=self.job)
        return await self.bus.ask(
            "rendezvous", "show", question, RoundDocument, job=self.job, within_s=WITHIN_S
        )
