"""The agent's client of the warden: starts, signals and stops ranks, and reads their events."""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec

from everstep.bus.background import in_background
from everstep.messages.facts.ranks import ErrorRecord
from everstep_services.agent.core.exit import WARDEN_ENDED
from everstep_services.agent.ranks import process_tree, setup
from everstep_services.agent.ranks.liveness_port import LivenessPort
from everstep_services.agent.ranks.oom_kills import MemoryKills, kill_counts
from everstep_services.agent.ranks.protocol import (
    NodePlan,
    WardenEvent,
    WardenLost,
    WardenLostError,
)
from everstep_services.agent.ranks.round_watch import RoundWatch
from trainer_sdk.page_content import PageReading
from trainer_sdk.wire import (
    AllStopped,
    ForgeDown,
    ForgeUp,
    FromWarden,
    Gone,
    SaveTogether,
    Signal,
    Signalled,
    Spawned,
    StartFailed,
    Undefer,
    WardenStart,
    WardenStop,
    WireLine,
    encode,
)

_LONGEST_LINE = 1 << 24
_LOOK_EVERY_S = 0.5
_END_WITHIN_S = 15.0
_SIGNAL_WITHIN_S = 10.0
_LOST = WARDEN_ENDED + "{}; its log is {}"


@dataclass(eq=False, repr=False)
class WardenClient:
    """The ranks of one node, one round at a time. It knows no bus, and decides nothing."""

    _plan: NodePlan
    _writer: asyncio.StreamWriter
    _kills: MemoryKills
    door: LivenessPort | None
    """Where others may ask whether the warden lives."""

    def __post_init__(self) -> None:
        self.events: asyncio.Queue[WardenEvent] = asyncio.Queue()
        """The events, in order. Bounded by the ranks and by the few attempts of the forge."""
        self.watch = RoundWatch(
            self.events, self._deferred, is_silent=self._plan.command.kind == "program"
        )
        self.lost = asyncio.Event()
        """The warden is gone, which the last event tells."""
        self.warm = False
        """Whether the forge is ready: a start is a fork."""
        self._stopped: asyncio.Future[AllStopped] | None = None
        self._signalled: asyncio.Future[Signalled] | None = None
        self._lost = ""

    async def start(self, order: WardenStart) -> None:
        """Start the ranks of a round, after those of the previous round were stopped.

        Their environments are as they should be; the client adds `EVERSTEP_…`, and packs them.
        Returns when the order is sent; the outcome comes as events.
        """
        self._check()
        now = asyncio.get_running_loop().time()
        self.watch.begin(order.round, now)
        await self._kills.begin(now)
        prepare = partial(setup.prepare, self._plan, order.round)
        made = await asyncio.to_thread(lambda: [prepare(rank) for rank in order.ranks])
        for entry, folder, page in made:
            self.watch.add(entry.rank, folder, page)
        ranks, warm = tuple(entry for entry, *_ in made), order.warm and self._plan.warm
        await self._send(msgspec.structs.replace(order, ranks=ranks, warm=warm))

    async def signal(
        self, number: int, ranks: tuple[int, ...] | None = None, *, to_handlers: bool = False
    ) -> tuple[int, ...]:
        """Send a signal to ranks, not to their children; return the ranks that do not handle it.

        SIGUSR1 and SIGUSR2 never go to a rank that would die of them; with `to_handlers`, no
        signal does.
        """
        self._check()
        self._signalled = asyncio.get_running_loop().create_future()
        await self._send(Signal(number=number, ranks=ranks, to_handlers=to_handlers))
        async with asyncio.timeout(_SIGNAL_WITHIN_S):
            return (await self._signalled).unhandled

    async def stop(
        self,
        grace_s: float,
        kill_within_s: float = 30.0,
        *,
        is_done: bool = False,
        keeps: tuple[int, ...] = (),
        is_planned: bool = False,
        save: SaveTogether | None = None,
    ) -> AllStopped:
        """Send SIGTERM, wait for the grace, send SIGKILL, until no process of the round is left.

        Ranks that survive rounds are parked, if they are among `keeps`; with `save`, those that
        are parked save, and are parked again. Bounded by `grace_s` and
        `kill_within_s`, and by the time in which ranks promise to park. Raises WardenLostError if
        the warden is gone; then nothing is left, either.
        """
        self._check()
        if self._stopped is None or self._stopped.done():
            self._stopped = asyncio.get_running_loop().create_future()
            self.watch.ordered_to_end()
            leaves = is_done and self._plan.leaves
            order = WardenStop(
                grace_s=grace_s,
                kill_within_s=kill_within_s,
                is_done=is_done,
                leaves=leaves,
                keeps=keeps,
                is_planned=is_planned,
                save=save,
            )
            await self._send(order)
        return await asyncio.shield(self._stopped)

    def page(self, rank: int) -> PageReading | None:
        """The contents of a rank's page, also after its end.

        None before it has begun, and if its page is damaged.
        """
        watched = self.watch.rank(rank)
        return watched.reading() if watched is not None else None

    async def error(self, rank: int) -> ErrorRecord | None:
        """The exception that ended a rank, if it could record one."""
        watched = self.watch.rank(rank)
        if watched is None:
            return None
        return await asyncio.to_thread(setup.read_error, watched.folder)

    async def on_line(self, octets: bytes) -> None:
        """The warden has sent a line."""
        line, now = _LINE.decode(octets), asyncio.get_running_loop().time()
        match line:
            case Spawned():
                self.watch.spawned(line, now)
            case Gone():
                is_killed = line.signal == signal.SIGKILL
                self.watch.gone(line, now, await self._kills.blame() if is_killed else "")
            case Signalled():
                _answer(self._signalled, line)
            case AllStopped():
                self.watch.parked(line.kept)
                _answer(self._stopped, line)
            case ForgeUp() | ForgeDown():
                self.warm = isinstance(line, ForgeUp)
                self.events.put_nowait(line)
            case StartFailed():
                self.events.put_nowait(line)

    async def look(self) -> None:
        """Find what no message reports: pages with a dropped datagram, the kernel's counters."""
        now = asyncio.get_running_loop().time()
        self.watch.look(now)
        await self._kills.look(now)

    def lose(self, reason: str) -> None:
        """The warden is gone: end all waits for it."""
        self.warm, self.door = False, None
        self._lost = _LOST.format(reason, self._plan.runtime_dir / "warden.log")
        for waiting in (self._stopped, self._signalled):
            if waiting is not None and not waiting.done():
                waiting.set_exception(WardenLostError(self._lost))
                waiting.exception()  # perhaps nobody waits for it any more
        self.events.put_nowait(WardenLost(self._lost))
        self.lost.set()

    def _deferred(self, rank: int, number: int) -> None:
        """The warden knows whether others got the signal as well."""
        self._writer.write(encode(Undefer(rank=rank, number=number)))

    def _check(self) -> None:
        if self._lost:
            raise WardenLostError(self._lost)

    async def _send(self, line: WireLine) -> None:
        try:
            self._writer.write(encode(line))
            await self._writer.drain()
        except ConnectionError as error:
            raise WardenLostError(
                _LOST.format(error, self._plan.runtime_dir / "warden.log")
            ) from error


A = TypeVar("A")


def _answer(waiting: "asyncio.Future[A] | None", line: A) -> None:
    if waiting is not None and not waiting.done():
        waiting.set_result(line)


_LINE: "msgspec.json.Decoder[FromWarden]" = msgspec.json.Decoder(FromWarden)


@asynccontextmanager
async def held_folder(plan: NodePlan) -> AsyncIterator[int]:
    """Hold the lock of the agent's folder, so that no other agent takes it for left behind.

    Raises StartRefusedError if another agent holds it.
    """
    lock = await asyncio.to_thread(setup.hold, plan.runtime_dir)
    try:
        yield lock
    finally:
        os.close(lock)


@asynccontextmanager
async def opened_warden(plan: NodePlan, lock: int) -> AsyncIterator[WardenClient]:
    """Open a client whose warden runs; at the end nothing that it has started is left.

    Several may be opened in one held folder, one after the other.
    """
    laid = await asyncio.to_thread(setup.lay, plan, lock)
    try:
        reader, writer = await asyncio.open_connection(sock=laid.control, limit=_LONGEST_LINE)
        # ranks are born in the warden's control group
        kills = MemoryKills(partial(kill_counts, laid.warden.pid))
        warden = WardenClient(plan, writer, kills, laid.door)
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_datagram_endpoint(
            lambda: _Datagrams(warden.watch, loop), sock=laid.datagrams
        )
        try:
            async with in_background(_follow(warden, reader, plan, laid), _look_for_ever(warden)):
                yield warden
        finally:
            transport.close()
            writer.close()
    finally:
        await asyncio.shield(asyncio.to_thread(_close, plan, laid))


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, watch: RoundWatch, loop: asyncio.AbstractEventLoop) -> None:
        self._watch = watch
        self._loop = loop

    def datagram_received(self, data: bytes, addr: object) -> None:
        del addr
        self._watch.on_datagram(data, self._loop.time())


async def _follow(
    warden: WardenClient, reader: asyncio.StreamReader, plan: NodePlan, laid: setup.WardenSetup
) -> None:
    try:
        while line := await reader.readline():
            await warden.on_line(line)
    except ConnectionError:
        pass
    code = await asyncio.to_thread(laid.warden.wait)
    await asyncio.to_thread(_kill_rest, plan, laid)
    warden.lose(_how(code))


async def _look_for_ever(warden: WardenClient) -> None:
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        await warden.look()


def _how(code: int) -> str:
    return (
        f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it exited with {code}"
    )


def _kill_rest(plan: NodePlan, laid: setup.WardenSetup) -> None:
    """Kill the processes that the kernel did not kill with the warden: those that ranks started."""
    while process_tree.kill_instance(plan.instance, laid.others):
        continue


def _close(plan: NodePlan, laid: setup.WardenSetup) -> None:
    """The warden ends when the control socket is closed; then nothing is left."""
    laid.control.close()
    try:
        laid.warden.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        laid.warden.kill()
        laid.warden.wait()
        _kill_rest(plan, laid)
