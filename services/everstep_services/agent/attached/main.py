"""The process of an agent in attach mode: its socket, its bus, its signals."""

import asyncio
import logging
import signal
from contextlib import AsyncExitStack

from everstep.bus import BusSettings, connect
from everstep.bus.errors import SpoolBusyError
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.attached.job_folder import bound_socket
from everstep_services.agent.attached.rank_stderr import RankStderr
from everstep_services.agent.attached.rank_watch import RankWatch
from everstep_services.agent.attached.service import AttachedService
from everstep_services.agent.ranks.setup import sweep
from everstep_services.agent.telemetry.span_export import exporting_spans

log = logging.getLogger(__name__)

_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_ANNOUNCE = (signal.SIGUSR1, signal.SIGUSR2)
"""Sent to all processes of a step, these signals are for the training: the agent ignores them."""


class AgentThereError(EverstepError):
    """Another agent watches these ranks already."""

    def __init__(self, job: str) -> None:
        super().__init__(f"another agent of this node watches the ranks of job {job}")


async def run_attached(plan: AttachedPlan, settings: BusSettings, voice: RankStderr) -> None:
    """Watch until the ranks have gone, or until a signal tells the agent to leave."""
    loop, clock = asyncio.get_running_loop(), SystemClock()
    name = f"agent-{plan.job}-{plan.node}"
    spool = plan.state_dir / "spool" / name
    await asyncio.to_thread(sweep, plan.folder.parent)
    with bound_socket(plan.folder) as door:
        try:
            # The bus may stay away: facts wait in the spool.
            async with AsyncExitStack() as stack:
                if plan.traces_url:
                    await stack.enter_async_context(exporting_spans(plan.traces_url))
                bus = await stack.enter_async_context(
                    connect(settings, name, spool=spool, wait=False)
                )
                watching = RankWatch(plan.folder, plan.place, door, clock)
                service = AttachedService(plan, bus, clock, watching, voice)
                for number in _ENDS:
                    text = f"the agent that watched it was ended by {number.name}"
                    loop.add_signal_handler(number, service.leave, text)
                for number in _ANNOUNCE:
                    loop.add_signal_handler(number, log.info, "signal_ignored signal=%d", number)
                await service.run()
        except SpoolBusyError as error:
            raise AgentThereError(plan.job) from error
