"""The beats of an agent: one a second, one when somebody asks, one whenever the state changes."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from everstep import subjects
from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import BeatNow, NodeBeat, WardenPlace
from everstep_services.agent.core.actions import Action
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.probes.periodic.probes import PeriodicProbes
from everstep_services.agent.ranks.liveness_port import LivenessPort, answer, family_of
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.stalls.idleness import Idleness
from everstep_services.agent.telemetry.progress import ProgressReader

log = logging.getLogger(__name__)

_BEAT_EVERY_S = 1.0
_WARDENS_MOST = 64
_WARDEN_WITHIN_S = 0.5
_ASK_AGAIN_S = 0.15
_ANSWER_BYTES = 64
_LOOKS = 10


class HostLoad:
    """How overloaded the host is, by the last ten beats."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._tasks: deque[float] = deque(maxlen=_LOOKS)
        self._late_s: deque[float] = deque(maxlen=_LOOKS)
        self._looked_at: float | None = None

    def look(self, now: float) -> None:
        """Look at the host; a beat is due."""
        if self._looked_at is not None:
            self._late_s.append(max(0.0, now - self._looked_at - _BEAT_EVERY_S))
        self._looked_at = now
        try:
            running = self._stat.read_text().partition("procs_running ")[2].split()
            # This process runs, too.
            self._tasks.append((int(running[0]) - 1) / (os.cpu_count() or 1))
        except (OSError, ValueError, IndexError):
            self._tasks.clear()

    def with_load(self, beat: NodeBeat) -> NodeBeat:
        """The beat with what is known."""
        mean = sum(self._tasks) / len(self._tasks) if self._tasks else 0.0
        late_s = max(self._late_s, default=0.0)
        return replace(beat, load_ratio=round(mean, 2), late_s=round(late_s, 3))


@dataclass(eq=False, repr=False)
class BeatSender:
    """Sends the beats of one agent, and looks with each whether its ranks are idle."""

    _plan: RunPlan
    _bus: Bus
    _clock: Clock
    _agent: Agent
    _progress: ProgressReader
    _probes: PeriodicProbes
    _recorder: Recorder
    _door: Callable[[], LivenessPort | None]
    """The port of the warden's liveness."""
    _do: Callable[[Sequence[Action]], None]
    """Carries out the core's actions."""

    def __post_init__(self) -> None:
        self._idleness = Idleness(self._clock)
        self._load = HostLoad()

    def send(self, alive: tuple[str, ...] = ()) -> None:
        """Send a beat now; `alive` are other nodes whose wardens live."""
        is_cut_off = not self._bus.connected
        beat = self._progress.beat(cut_off=is_cut_off, door=self._door(), alive=alive)
        beat = self._load.with_load(self._probes.with_probes(beat))
        self._bus.send(subjects.beat(self._plan.job, self._plan.node), beat)

    async def beat_for_ever(self) -> None:
        """Send a beat and the progress of the ranks, and look whether they are idle."""
        while True:
            self._load.look(self._clock.now())
            self.send()
            self._recorder.keep(*self._progress.facts())
            if self._agent.last_ranks:
                pids = self._progress.pids(self._agent.last_ranks)
                idle_s = await asyncio.to_thread(self._idleness.look, pids)
                self._do(self._agent.idle(idle_s))
            await self._clock.sleep(_BEAT_EVERY_S)

    async def beat_when_hailed_for_ever(self) -> None:
        """Answer those who ask whether this agent lives."""
        subject = subjects.hail(self._plan.job, self._plan.node)
        inquiry: asyncio.Task[None] | None = None
        async with self._bus.subscribe(subject, BeatNow) as hails, asyncio.TaskGroup() as inquiries:
            async for hail in hails:
                self.send()
                if hail.wardens and (inquiry is None or inquiry.done()):
                    inquiry = inquiries.create_task(self._inquire(hail), name="inquiry")

    async def _inquire(self, hail: BeatNow) -> None:
        """Report which of the silent nodes have wardens that live."""
        if alive := await who_lives(hail.wardens):
            self.send(alive)


async def who_lives(wardens: Collection[WardenPlace]) -> tuple[str, ...]:
    """The nodes whose wardens answer soon; each is asked a few times, as datagrams may be lost."""
    async with asyncio.TaskGroup() as asking:
        asked = [
            (warden.node, asking.create_task(_lives(warden)))
            for warden in [*wardens][:_WARDENS_MOST]
        ]
    return tuple(node for node, task in asked if task.result())


async def _lives(warden: WardenPlace) -> bool:
    loop = asyncio.get_running_loop()
    try:
        with socket.socket(family_of(warden.address), socket.SOCK_DGRAM) as ours:
            ours.settimeout(0)
            async with asyncio.timeout(_WARDEN_WITHIN_S):
                await loop.sock_connect(ours, (warden.address, warden.port))
                while True:
                    await loop.sock_sendall(ours, warden.token.encode())
                    try:
                        async with asyncio.timeout(_ASK_AGAIN_S):
                            reply = await loop.sock_recv(ours, _ANSWER_BYTES)
                    except TimeoutError:
                        continue
                    if reply == answer(warden.token):
                        return True
    except (OSError, TimeoutError, ValueError, OverflowError) as error:
        log.debug("warden_silent node=%s error=%r", warden.node, error)
        return False
