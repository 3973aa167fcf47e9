"""A node of a job whose ranks torchrun starts: joins, hears orders, watches, reports, and beats."""

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from everstep import subjects
from everstep.bus import BusSettings, connect
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError, BusError
from everstep.clock import SystemClock
from everstep.messages import (
    Done,
    Join,
    Joined,
    Leave,
    LeaveJob,
    Message,
    NodeBeat,
    Order,
    Report,
    Reported,
    StartRanks,
    StopRanks,
)
from everstep_services.agent.run_plan import AgentPlan
from everstep_services.agent.torchrun.rank_hangs import RankHangs
from trainer_sdk.launchers import LaunchedRank

SERVICE = "rendezvous"
_ASK_WITHIN_S = 5.0
_AGAIN_S = 1.0
_LEAVE_WITHIN_S = 5.0
_BEAT_EVERY_S = 1.0
_SECTIONS_EVERY = 10
"""Beats."""
_BUSY = {"500", "502", "503"}

log = logging.getLogger(__name__)

Result = TypeVar("Result")
Answer = TypeVar("Answer", bound=Message)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeIdentity(AgentPlan):
    """The node of this agent, and its job."""

    instance: str
    place: LaunchedRank
    """The first rank of this node, as far as torchrun's command line tells."""
    folder: Path
    """Where the ranks of this node have their pages."""


class JobOverError(Exception):
    """The job has ended, or this node may not take part; the text says why."""


class RendezvousMember:
    """The node, in a thread of its own: torchrun's loop is synchronous. Any thread may call it."""

    def __init__(self, identity: NodeIdentity, settings: BusSettings) -> None:
        self._identity = identity
        self._settings = settings
        self._changed = threading.Condition()
        self._order: StartRanks | None = None
        self._round = 0
        """The newest round that it has heard of."""
        self._taken: StartRanks | None = None
        """The order of the round in which it takes part."""
        self._is_over = False
        """Whether that round was ended by rendezvous."""
        self._left: LeaveJob | None = None
        self._hangs = RankHangs(
            identity.folder, identity.place, identity.limits, SystemClock(), self._report_hang
        )
        self._bus: NatsBus | None = None
        self._ended: asyncio.Event | None = None
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="everstep-member", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def round_is_over(self) -> bool:
        """Whether the ranks of this node must stop, and join a new round."""
        return self._is_over

    @property
    def leaves(self) -> LeaveJob | None:
        """The order to leave, if it has come."""
        return self._left

    def next_round(self, master_port: Callable[[], int], within_s: float) -> StartRanks:
        """Join until a round forms with this node in it; `TimeoutError` after `within_s`."""
        deadline = time.monotonic() + within_s
        after = 0 if self._taken is None else self._taken.round
        while True:
            self._call(self._join(after, master_port()), _ASK_WITHIN_S * 2)
            wait_s = min(_AGAIN_S, max(0.0, deadline - time.monotonic()))
            with self._changed:
                self._changed.wait_for(lambda: self._has_news(after), wait_s)
                if self._left is not None:
                    raise JobOverError(f"the job is over: {self._left.state}")
                if self._order is not None and self._order.round > after:
                    self._taken, self._is_over = self._order, False
                    return self._taken
            if time.monotonic() >= deadline:
                raise TimeoutError

    def end_round(self, reason: str, within_s: float) -> None:
        """Report that this node's ranks have failed, unless rendezvous has ended the round."""
        if self._taken is None:
            return
        if not self._is_over:
            self.report("rank_exited", reason, exit_code=1)
            with self._changed:
                self._changed.wait_for(lambda: self._is_over or self._left is not None, within_s)

    def report(self, event: str, reason: str, **fields: Any) -> None:
        """Report an event of this node's ranks; torchrun goes on if nobody hears it."""
        report = self._report_of(event, reason, **fields)
        if report is None:
            return
        with contextlib.suppress(BusError, TimeoutError):
            self._call(self._ask("report", report, Reported), _ASK_WITHIN_S)

    def _report_of(self, event: str, reason: str, **fields: Any) -> Report | None:
        """A report of the round that this node takes part in; None if it takes part in none."""
        taken, own = self._taken, self._identity
        if taken is None:
            return None
        return Report(
            job=own.job,
            node=own.node,
            instance=own.instance,
            slot=taken.slot,
            round=taken.round,
            event=event,
            reason=reason,
            **fields,
        )

    def leave(self, cause: str, reason: str, exit_code: int) -> None:
        """Take leave, and end the thread."""
        own = self._identity
        leave = Leave(
            job=own.job,
            node=own.node,
            instance=own.instance,
            round=self._round,
            cause=cause,
            reason=reason,
            exit_code=exit_code,
        )
        with contextlib.suppress(BusError, TimeoutError):
            self._call(self._ask("leave", leave, Done), _LEAVE_WITHIN_S)
        if self._ended is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(_LEAVE_WITHIN_S)

    def _has_news(self, after: int) -> bool:
        is_new = self._order is not None and self._order.round > after
        return is_new or self._left is not None

    def _call(self, work: Coroutine[Any, Any, Result], within_s: float) -> Result:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(within_s)

    # In the thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._live())
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            self._failure = error
        finally:
            self._ready.set()
            self._loop.close()

    async def _live(self) -> None:
        self._ended = asyncio.Event()
        own = self._identity
        async with connect(self._settings, f"torchrun-{own.job}-{own.node}") as bus:
            self._bus = bus
            async with self._listening(bus):
                self._ready.set()
                await self._ended.wait()

    @contextlib.asynccontextmanager
    async def _listening(self, bus: NatsBus) -> AsyncIterator[None]:
        own = self._identity
        names = (None, own.node, own.instance)
        heard = [asyncio.Event() for _ in names]
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(self._beat(bus)), tasks.create_task(self._watch(bus))]
            for name, is_subscribed in zip(names, heard, strict=True):
                listening = self._listen(bus, subjects.order(own.job, name), is_subscribed)
                running.append(tasks.create_task(listening))
            for is_subscribed in heard:
                await is_subscribed.wait()
            try:
                yield
            finally:
                for task in running:
                    task.cancel()

    async def _listen(self, bus: NatsBus, subject: str, is_subscribed: asyncio.Event) -> None:
        async with bus.subscribe(subject, Order) as orders:
            is_subscribed.set()
            async for order in orders:
                self._obey(order)

    async def _watch(self, bus: NatsBus) -> None:
        """Look for ranks that hang; the job goes on if that fails."""
        try:
            await self._hangs.watch_for_ever(bus, self._identity.job, lambda: self._taken)
        except* OSError as errors:
            log.warning("hangs_are_not_found error=%s", errors.exceptions[0])

    async def _report_hang(self, rank: int, reason: str, waited_s: float) -> None:
        report = self._report_of("rank_stalled", reason, rank=rank, waited_s=waited_s)
        if report is None or self._is_over:
            return
        with contextlib.suppress(BusError, TimeoutError):
            await self._ask("report", report, Reported)

    def _obey(self, order: Order | None) -> None:
        with self._changed:
            match order:
                case StartRanks() if order.round > self._round:
                    self._order, self._round = order, order.round
                    self._is_over = self._taken is not None
                case StopRanks() if self._taken and order.round == self._taken.round:
                    self._is_over = True
                case LeaveJob():
                    self._left, self._is_over = order, True
                case _:
                    return
            self._changed.notify_all()

    async def _beat(self, bus: NatsBus) -> None:
        own, sequence = self._identity, 0
        while True:
            sequence += 1
            taken = None if self._is_over else self._taken
            teaches = not sequence % _SECTIONS_EVERY
            beat = NodeBeat(
                job=own.job,
                node=own.node,
                sequence=sequence,
                at=datetime.now(UTC),
                state="joining" if taken is None else "running",
                round=None if taken is None else taken.round,
                slot=None if taken is None else taken.slot,
                ranks=self._hangs.beats(),
                sections=self._hangs.sections_seen() if teaches else (),
            )
            bus.send(subjects.beat(own.job, own.node), beat)
            await asyncio.sleep(_BEAT_EVERY_S)

    async def _join(self, last_round: int, master_port: int) -> None:
        own, taken = self._identity, self._taken
        join = Join(
            job=own.job,
            node=own.node,
            instance=own.instance,
            spec=own.spec,
            allocation=own.allocation,
            address=own.address,
            ranks=own.spec.ranks_per_node,
            last_round=last_round or None,
            last_slot=None if taken is None else taken.slot,
            known_round=self._round,
            master_port=master_port,
        )
        try:
            joined = await self._ask("join", join, Joined)
        except AskRefusedError as error:
            if error.code in _BUSY:
                return
            raise JobOverError(f"rendezvous refuses this node: {error}") from error
        except (BusError, TimeoutError):
            return  # nobody answers now: the next question may be answered
        if joined.exit_code is not None:
            raise JobOverError(f"this node may not take part: {joined.reason}")
        self._obey(joined.order)

    async def _ask(self, verb: str, question: Message, of: type[Answer]) -> Answer:
        assert self._bus is not None
        return await self._bus.ask(
            SERVICE, verb, question, of, job=self._identity.job, within_s=_ASK_WITHIN_S
        )
