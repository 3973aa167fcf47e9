"""Hears orders to inject faults, waits until they are due, announces them, and makes them."""

import asyncio
import contextlib
import json
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from everstep import subjects
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus
from everstep.errors import EverstepError
from everstep.messages import FaultInjected, InjectFault, OperatorActed, StartRanks
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.injection.agent_faults import AgentFaults
from everstep_services.agent.ranks.source import RankSource
from everstep_services.agent.run_plan import RunPlan
from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import ShortPath
from trainer_sdk.inject.catalog import BadFaultError, FaultRequest, fault_request

_WITHIN_S = 20.0


class RankChannel:
    """Use `RankChannel.opened`."""

    def __init__(
        self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._rank = rank
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def opened(cls, folder: Path, rank: int) -> AsyncIterator["RankChannel"]:
        """The channel to a rank. Raises `BadFaultError` if it does not listen."""
        try:
            with ShortPath(str(folder / layout.INJECTION_SOCKET)) as path:
                reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise BadFaultError(
                f"rank {rank} does not listen for faults: it is not a Python script, or not there "
                f"yet, or gone"
            ) from error
        try:
            yield cls(rank, reader, writer)
        finally:
            writer.close()

    async def knock(self, wish: FaultRequest) -> None:
        """Raise `BadFaultError` if the rank cannot have this fault."""
        asked = {
            "fault": wish.fault.name,
            "for_s": wish.for_s,
            "amount": wish.amount if wish.fault.amount else None,
            "target": wish.target,
        }
        self._writer.write(json.dumps(asked).encode())
        try:
            async with asyncio.timeout(_WITHIN_S):
                answer = json.loads(await self._reader.read(1 << 16))
        except (TimeoutError, OSError, ValueError) as error:
            raise BadFaultError(
                f"rank {self._rank} does not answer within {_WITHIN_S:g} s: it is stopped, or "
                f"another fault keeps it"
            ) from error
        if answer["refused"]:
            raise BadFaultError(f"rank {self._rank}: {answer['refused']}")

    async def go(self) -> None:
        """Let the rank begin."""
        self._writer.write(b"go")
        await self._writer.drain()


log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.01
_TOLD_WITHIN_S = 1.0
_SIGNALS = {
    "kill": signal.SIGKILL,
    "terminate": signal.SIGTERM,
    "interrupt": signal.SIGINT,
    "stop": signal.SIGSTOP,
}


@dataclass(eq=False, repr=False)
class FaultInjector:
    """The faults of one agent. It exists only if `--allow-injection` was given."""

    _plan: RunPlan
    _bus: Bus
    _harm: AgentFaults
    _agent: Agent
    _ranks: RankSource
    _say: Callable[[str], None]

    def __post_init__(self) -> None:
        self._heard: set[str] = set()
        self._lasting: set[tuple[str, int | None]] = set()

    async def hear_for_ever(self, instance: str) -> None:
        """Handle every order to inject a fault; faults that still last at the end are undone."""
        subject = subjects.injection(self._plan.job, instance)
        async with (
            self._bus.subscribe(subject, InjectFault) as inbox,
            asyncio.TaskGroup() as tasks,
        ):
            async for order in inbox:
                if order.id not in self._heard:
                    self._heard.add(order.id)
                    tasks.create_task(self._obey(order))

    async def _obey(self, order: InjectFault) -> None:
        """Handle one order: a fault that cannot be made must not end the agent."""
        try:
            refused = await self._tried(order)
            if refused:
                log.info("fault_refused fault=%s error=%s", order.fault, refused)
                await self._bus.record(self._refusal(order, refused))
        except EverstepError as error:  # the disk is full, perhaps because of this fault
            log.warning("fault_not_recorded fault=%s error=%s", order.fault, error)

    async def _tried(self, order: InjectFault) -> str:
        """Why the fault was not made; empty if it was."""
        try:
            wished = fault_request(
                order.fault, for_s=order.for_s, amount=order.amount, target=order.target
            )
            await self._until_due(order)
            await self._make(order, wished)
        except (BadFaultError, OSError, TimeoutError) as error:
            return str(error) or type(error).__name__
        return ""

    async def _until_due(self, order: InjectFault) -> None:
        while True:
            now = self._agent.order
            if now is None or now.round != order.round:
                raise BadFaultError(f"round {order.round} is over, and {order.fault} was for it")
            if order.after_step is None or self._step(order, now) >= order.after_step:
                return
            await asyncio.sleep(_LOOK_EVERY_S)

    def _step(self, order: InjectFault, now: StartRanks) -> int:
        rank = now.first_rank if order.rank is None else order.rank
        return self._ranks.step(rank) or 0

    async def _make(self, order: InjectFault, wished: FaultRequest) -> None:
        place = wished.fault.place
        if (place == "agent") != (order.rank is None):
            wanted = "a node, not a rank" if place == "agent" else "a rank"
            raise BadFaultError(f"{wished.fault.name} needs {wanted} to happen in")
        key = (wished.fault.name, order.rank)
        if key in self._lasting:
            raise BadFaultError(f"{wished.fault.name} lasts still: wait until it is over")
        self._lasting.add(key)
        try:
            match order.rank:
                case None:
                    await self._in_agent(order, wished)
                case rank if place == "process":
                    await self._on_process(order, wished, rank)
                case rank:
                    await self._in_rank(order, wished, rank)
        finally:
            self._lasting.discard(key)

    async def _in_agent(self, order: InjectFault, wished: FaultRequest) -> None:
        await asyncio.to_thread(self._harm.check, wished)
        await self._announce(order, wished)
        await self._harm.make(wished)

    async def _on_process(self, order: InjectFault, wished: FaultRequest, rank: int) -> None:
        pid = self._pid(rank)
        if not pid:
            raise BadFaultError(f"rank {rank} has no process on {self._plan.node}")
        await self._announce(order, wished)
        os.kill(pid, _SIGNALS[wished.fault.name])
        if wished.fault.lasts and wished.for_s is not None:
            try:
                await asyncio.sleep(wished.for_s)
            finally:
                if self._pid(rank) == pid:
                    os.kill(pid, signal.SIGCONT)

    def _pid(self, rank: int) -> int:
        """The process of a rank; 0 while there is none."""
        watched = self._ranks.watched(rank)
        return 0 if watched is None or watched.gone else watched.pid

    async def _in_rank(self, order: InjectFault, wished: FaultRequest, rank: int) -> None:
        folder = self._ranks.folder(rank)
        if folder is None:
            raise BadFaultError(f"rank {rank} does not run on {self._plan.node}")
        async with RankChannel.opened(folder, rank) as door:
            await door.knock(wished)
            await self._announce(order, wished)
            await door.go()

    async def _announce(self, order: InjectFault, wished: FaultRequest) -> None:
        """Record it before anything happens, and deliver it to the bus if the bus is there."""
        fact = FaultInjected(
            **self._about(order),
            fault=wished.fault.name,
            by=order.by,
            node=self._plan.node,
            rank=order.rank,
            target=wished.target,
            lasts_s=wished.for_s,
            expected=wished.fault.effect,
        )
        self._agent.injected(fact)
        await self._bus.record(fact)
        where = self._plan.node if order.rank is None else f"rank {order.rank}"
        self._say(f"{order.by} injects {wished.fault.name} into {where}: {wished.fault.effect}")
        with contextlib.suppress(BusError, TimeoutError):
            await self._bus.flush(_TOLD_WITHIN_S)

    def _refusal(self, order: InjectFault, reason: str) -> OperatorActed:
        return OperatorActed(
            **self._about(order),
            by=order.by,
            action="inject",
            target=order.fault,
            outcome="refused",
            reason=reason,
            origin="cli",
        )

    def _about(self, order: InjectFault) -> dict[str, Any]:
        return {
            "id": order.id,
            "job": order.job,
            "at": self._harm.clock.wall(),
            "source": f"agent/{self._plan.node}",
            "round": order.round,
        }
