"""The process of `everstep run`: its warden, its bus, its signals, its exit code."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.bus import BusSettings, connect
from everstep.bus.background import in_background
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusDeniedError, BusError, SpoolBusyError
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep_services.agent.ranks.device_memory import has_devices
from everstep_services.agent.ranks.setup import sweep
from everstep_services.agent.ranks.warden_client import held_folder, opened_warden
from everstep_services.agent.replicas.node_states import opened_states
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.rank_runner import WardenClients
from everstep_services.agent.runtime.workdir import Workdir, private_dir
from everstep_services.agent.stalls.limits_table import external_limits
from everstep_services.agent.telemetry.leftover_spools import remember, send_left_and_log
from everstep_services.agent.telemetry.span_export import exporting_spans

if TYPE_CHECKING:
    from everstep_services.agent.injection.agent_faults import AgentFaults

log = logging.getLogger(__name__)

UNREACHABLE = 94
_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_ANNOUNCE = (signal.SIGUSR1, signal.SIGUSR2)


class NoControlPlaneError(EverstepError):
    """The bus could not be reached at the start."""

    def __init__(self, error: BusError) -> None:
        super().__init__(f"{error}; without a bus, use `everstep run --standalone`")


class NodeIdTakenError(EverstepError):
    """Another agent of this job runs under the same name on this host."""

    def __init__(self, job: str, node: str) -> None:
        super().__init__(
            f"another agent runs as {node} in job {job}, and on this host: give each its own "
            f"--node-id, or stop the other"
        )


class ProcessSignals:
    """Until a handler is set, signals end the process; from then on the handler decides.

    Signals that only announce something to ranks are ignored until then: there are no ranks yet.
    """

    def __init__(self, notices: Collection[str]) -> None:
        self._main = asyncio.current_task()
        self._for_ranks = {number for number in _ANNOUNCE if number.name not in notices}
        self._handler: Callable[[int], None] | None = None
        self.ended_by: int | None = None

    def _came(self, number: int) -> None:
        if self._handler is not None:
            self._handler(number)
        elif number in self._for_ranks:
            _unneeded(number)
        elif self._main is not None:
            self.ended_by = number
            self._main.cancel()

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Receive the signals to this process until the end of the block."""
        loop = asyncio.get_running_loop()
        # under `nohup`, the end of a terminal does not end the agent
        is_kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        numbers = [number for number in _SIGNALS if number != signal.SIGHUP or not is_kept]
        for number in numbers:
            loop.add_signal_handler(number, self._came, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    @contextmanager
    def handed_to(self, handler: Callable[[int], None]) -> Iterator[None]:
        """Let this handler decide about signals until the end of the block."""
        self._handler = handler
        try:
            yield
        finally:
            self._handler = _unneeded


def _unneeded(number: int) -> None:
    """Ignore a signal before there are ranks, or while the agent leaves and cleans up."""
    log.info("signal_ignored signal=%d", number)


async def run_agent(plan: RunPlan, bus: Awaitable[BusSettings], base: dict[str, str]) -> int:
    """Run one agent to its end, and return the exit code. The bus may come after the forge starts.

    `base` is the environment that ranks inherit.
    """
    signals, instance = ProcessSignals(plan.agent.preempt_signals), new_id()[12:24]
    with signals.caught():
        try:
            return await _run(plan, bus, base, signals, instance)
        except asyncio.CancelledError:
            if signals.ended_by is None:
                raise
            return 128 + signals.ended_by


async def _run(
    plan: RunPlan,
    bus_settings: Awaitable[BusSettings],
    base: dict[str, str],
    signals: ProcessSignals,
    instance: str,
) -> int:
    runtime = runtime_dir(base, instance)
    async with AsyncExitStack() as stack:
        states = await stack.enter_async_context(opened_states(plan, SystemClock()))
        images = None if states is None else states.folder
        workdir = stack.enter_context(Workdir.opened(plan, runtime, base, images))
        node_plan = workdir.node_plan(instance)
        lock = await stack.enter_async_context(held_folder(node_plan))
        first = await stack.enter_async_context(AsyncExitStack())
        warden = await first.enter_async_context(opened_warden(node_plan, lock))
        # Imported only now, while the forge imports torch: ranks wait for the forge.
        from everstep_services.agent.runtime.service import AgentService

        await stack.enter_async_context(workdir.console_following())
        settings = await bus_settings
        name = f"agent-{plan.job}-{plan.node}"
        spool = plan.state_dir / "spool" / name
        harm, settings = await _harmable(plan, settings, stack)
        # Without a bus of another process, the services here export the spans of all.
        if plan.traces_url and not plan.standalone:
            await stack.enter_async_context(exporting_spans(plan.traces_url))
        bus = await stack.enter_async_context(_connected(plan, settings, name, spool))
        wardens = WardenClients(warden, first.aclose, partial(opened_warden, node_plan, lock))
        others = external_limits(
            base,
            preempt_grace_s=plan.agent.preempt_grace_s,
            scheduler_grace_s=plan.agent.scheduler_grace_s,
            has_nccl=has_devices(),
        )
        clock = SystemClock() if harm is None else harm.clock
        service = AgentService(
            plan, bus, wardens, workdir, clock, instance,
            others=others, states=states, harm=harm,
        )  # fmt: skip
        with signals.handed_to(service.signalled):
            code = await service.run()
        if states is not None:
            states.agent_ends(code)
        return code


@asynccontextmanager
async def _connected(
    plan: RunPlan, settings: BusSettings, name: str, spool: Path
) -> AsyncIterator[NatsBus]:
    """Connect the agent to the bus, and send in parallel what other agents have left in spools."""
    async with AsyncExitStack() as stack:
        try:
            bus = await stack.enter_async_context(connect(settings, name, spool=spool))
        except BusDeniedError:
            raise
        except SpoolBusyError as error:
            raise NodeIdTakenError(plan.job, plan.node) from error
        except BusError as error:
            raise NoControlPlaneError(error) from error
        with suppress(OSError):  # the disk is full: the next agent cannot log in to send our facts
            await asyncio.to_thread(remember, spool, settings)
        async with in_background(send_left_and_log(spool.parent)):
            yield bus


async def _harmable(
    plan: RunPlan, settings: BusSettings, stack: AsyncExitStack
) -> "tuple[AgentFaults | None, BusSettings]":
    """Prepare the faults that may be injected; nothing in a job that allows none."""
    if not plan.allow_injection:
        return None, settings
    from everstep_services.agent.injection.agent_faults import opened_agent_faults

    return await stack.enter_async_context(opened_agent_faults(settings))


def runtime_dir(environ: dict[str, str], instance: str) -> Path:
    """The folder for sockets and pages of this agent: in memory if possible, for this user only."""
    chosen = environ.get("XDG_RUNTIME_DIR")
    if chosen and Path(chosen).is_dir():
        base = Path(chosen) / "everstep"
    else:
        memory = Path("/dev/shm")  # noqa: S108  a folder of ours in it, 0700
        root = memory if os.access(memory, os.W_OK) else Path("/tmp")  # noqa: S108
        base = root / f"everstep-{os.getuid()}"
    sweep(private_dir(base))
    return private_dir(base / instance)
