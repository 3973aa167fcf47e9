"""Tells the agents of a job what faults to make, over the bus, and hears what came of it."""

import asyncio
from contextlib import suppress
from typing import Any

import msgspec

from everstep import subjects
from everstep.bus import connect
from everstep.bus.errors import BusError, BusTimeoutError, BusUnreachableError
from everstep.bus.ports import Bus, Inbox
from everstep.bus.topology import ROUNDS
from everstep.ids import new_id
from everstep.messages import FaultInjected, InjectFault, OperatorActed, RoundDocument, Seat
from everstep.messages.codec import decode_as
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.faults.scenario import FaultPlace, PlannedFault, RankMap, settled
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.bus_settings import named_bus
from everstep_services.cli.operator_requests import asker
from everstep_services.cli.output import say

_HEARD_WITHIN_S = 4.0
_LOOK_EVERY_S = 0.5
_LATE_S = 10.0
"""After this time without an answer from a round that is over, its agent and the order are gone."""
_OVER = {"done", "stopped"}

_Answer = FaultInjected | OperatorActed


class FaultInjection:
    """One run of the command, for one job."""

    def __init__(self, invocation: Invocation, job: str, seed: int) -> None:
        self._invocation = invocation
        self._job = job
        self._seed = seed
        self._answers: dict[str, asyncio.Future[_Answer]] = {}
        self._heard_by: set[str] = set()

    async def carry_out(self, faults: list[PlannedFault], *, is_dry: bool) -> list[dict[str, Any]]:
        """What was done, in the order of its times. `CliError` if any of it could not be."""
        settings = await asyncio.to_thread(named_bus, self._invocation)
        if settings is None:
            raise CliError(
                "no bus is known: start one with `everstep up`, or name it as url in [bus]",
                Exit.UNREACHABLE,
            )
        settings = msgspec.structs.replace(settings, spool_dir=None)  # nothing is recorded here
        try:
            async with connect(settings, "cli") as bus:
                return await self._on(bus, faults, is_dry=is_dry)
        except* CliError as group:
            errors: BaseException = group
            while isinstance(errors, BaseExceptionGroup):
                errors = errors.exceptions[0]
            raise errors from None

    async def _on(
        self, bus: Bus, faults: list[PlannedFault], *, is_dry: bool
    ) -> list[dict[str, Any]]:
        document = await self._running(bus)
        places = settled(faults, _map_of(document), self._seed)
        say(f"everstep: seed {self._seed}")
        for fault, place in places:
            say(f"everstep: {fault.wish.fault.name} in {place}{_when(fault)}")
        if is_dry:
            return []
        injected = subjects.fact(self._job, "fault_injected")
        refused = subjects.fact(self._job, "operator_acted")
        async with (
            bus.subscribe(injected, FaultInjected) as made,
            bus.subscribe(refused, OperatorActed) as not_made,
            asyncio.TaskGroup() as hearing,
        ):
            ears = [hearing.create_task(self._hear(inbox)) for inbox in (made, not_made)]
            async with asyncio.TaskGroup() as tasks:
                done = [tasks.create_task(self._one(bus, *pair)) for pair in places]
            for ear in ears:
                ear.cancel()
        return [task.result() for task in done]

    async def _hear(self, inbox: Inbox[FaultInjected] | Inbox[OperatorActed]) -> None:
        async for fact in inbox:
            waiting = self._answers.get(fact.id)
            if waiting is not None and not waiting.done():
                waiting.set_result(fact)

    async def _one(self, bus: Bus, fault: PlannedFault, place: FaultPlace) -> dict[str, Any]:
        await asyncio.sleep(fault.after_s)
        while True:
            document = await self._running(bus)
            if place.rank is not None:  # it may run on another node by now
                place = FaultPlace(place.rank, _map_of(document).node_of(place.rank))
            order = self._order(fault, place, document.round)
            if not await self._is_heard(bus, order, document, place):
                continue
            answer = await self._answer(bus, order)
            if isinstance(answer, FaultInjected):
                return {
                    "id": answer.id,
                    "fault": answer.fault,
                    "node": answer.node,
                    "rank": answer.rank,
                    "round": answer.round,
                    "lasts_s": answer.lasts_s,
                    "seed": self._seed,
                }
            if answer is not None and (await self._running(bus)).round == order.round:
                raise CliError(answer.reason)

    def _order(self, fault: PlannedFault, place: FaultPlace, number: int) -> InjectFault:
        wish = fault.wish
        return InjectFault(
            id=new_id(),
            job=self._job,
            round=number,
            reason=f"to test; seed {self._seed}",
            fault=wish.fault.name,
            by=asker(),
            rank=place.rank,
            after_step=fault.after_step,
            for_s=wish.for_s,
            amount=wish.amount if wish.fault.amount else None,
            target=wish.target,
        )

    async def _is_heard(
        self, bus: Bus, order: InjectFault, document: RoundDocument, place: FaultPlace
    ) -> bool:
        """False when its round is over first: an earlier fault may keep the agent from hearing.

        `CliError` when the agent never heard us, and nobody listens there.
        """
        instance = _instance_on(place.node, document)
        self._answers[order.id] = asyncio.get_running_loop().create_future()
        subject = subjects.injection(self._job, instance)
        while (await self._running(bus)).round == order.round:
            with suppress(BusTimeoutError, BusUnreachableError):
                if await bus.deliver(subject, order, within_s=_HEARD_WITHIN_S):
                    self._heard_by.add(place.node)
                    return True
                if place.node not in self._heard_by:
                    raise CliError(
                        f"{self._job} was not started with --allow-injection, or its agent on "
                        f"{place.node} is gone: nothing is injected"
                    )
            await asyncio.sleep(_LOOK_EVERY_S)
        return False

    async def _answer(self, bus: Bus, order: InjectFault) -> _Answer | None:
        """None when the round is over without any answer."""
        waiting, late_s = self._answers[order.id], 0.0
        while True:
            done, _ = await asyncio.wait([waiting], timeout=_LOOK_EVERY_S)
            if done:
                return waiting.result()
            if late_s > _LATE_S:
                return None
            try:
                if (await self._document(bus)).round != order.round:
                    late_s += _LOOK_EVERY_S
            except BusError:
                continue  # away: as a fault may have wanted it

    async def _running(self, bus: Bus) -> RoundDocument:
        """The job, once its ranks run."""
        while True:
            document = await self._document(bus)
            if document.phase in _OVER:
                raise CliError(f"{self._job} is over: {document.reason}", Exit.NOT_FOUND)
            if document.phase == "running":
                return document
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _document(self, bus: Bus) -> RoundDocument:
        document = await bus.documents(ROUNDS).get(self._job)
        if document.data is None:
            raise CliError(f"there is no job {self._job}; see everstep jobs", Exit.NOT_FOUND)
        return decode_as(document.data, RoundDocument)


def _members(document: RoundDocument) -> list[Seat]:
    members = [seat for seat in document.seats if seat.slot is not None and seat.stage != "gone"]
    return sorted(members, key=lambda seat: seat.slot or 0)


def _instance_on(node: str, document: RoundDocument) -> str:
    for seat in _members(document):
        if seat.node == node:
            return seat.instance
    nodes = ", ".join(seat.node for seat in _members(document))
    raise CliError(
        f"{document.job} no longer runs on {node}: round {document.round} runs on {nodes}. Has an "
        f"earlier fault taken it? Then name another node, or give it time to come back",
        Exit.NOT_FOUND,
    )


def _map_of(document: RoundDocument) -> RankMap:
    nodes, first = {}, 0
    for seat in _members(document):
        nodes[seat.node] = range(first, first + seat.ranks)
        first += seat.ranks
    return RankMap(document.job, nodes)


def _when(fault: PlannedFault) -> str:
    words = [f" after {fault.after_s:g} s"] if fault.after_s else []
    if fault.after_step is not None:
        words.append(f" after step {fault.after_step}")
    if fault.wish.for_s is not None:
        words.append(f" for {fault.wish.for_s:g} s")
    return ",".join(words)
