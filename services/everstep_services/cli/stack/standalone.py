"""`everstep run` without a bus: bus, services and agent in one process, as long as the job."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from dataclasses import replace

from everstep.bus import BusSettings
from everstep.bus.errors import BusUnreachableError
from everstep.bus.server.dev_server import DevServer
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.main import run_agent
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import StateDir
from everstep_services.cli.stack.supervisor import Ready, StackPlan, run_stack

log = logging.getLogger(__name__)

_AGAIN_AFTER_S = 1.0
_LIFE_S = 10.0


async def run_alone(
    ground: StackPlan, plan: RunPlan, base: dict[str, str], tell: Callable[[Ready], None]
) -> int:
    """The exit code of the agent. The services end after it, not before."""
    stop = asyncio.Event()
    login: asyncio.Future[BusSettings] = asyncio.get_running_loop().create_future()

    async with asyncio.TaskGroup() as tasks:

        def admit(server: DevServer) -> None:
            tasks.create_task(_admit(server, plan.job, login), name="admit")

        services = tasks.create_task(_keep(ground, stop, tell, admit), name="services")
        try:
            code = await run_agent(plan, login, base)
        finally:
            stop.set()
        await services
    return code


async def _keep(
    ground: StackPlan,
    stop: asyncio.Event,
    tell: Callable[[Ready], None],
    admit: Callable[[DevServer], None],
) -> None:
    """Run the services until `stop`; those that fail come back, and the ranks run on meanwhile.

    Those that cannot even start are a mistake in the settings, and end it.
    """
    have_started = False

    def started(ready: Ready) -> None:
        nonlocal have_started
        have_started = True
        tell(ready)

    while not stop.is_set():
        began = asyncio.get_running_loop().time()
        try:
            # Who serves a socket closes it: each time gets its own, of the same two ports.
            with ground.api.dup() as api, ground.observe.dup() as observe:
                await run_stack(replace(ground, api=api, observe=observe), stop, started, admit)
        except Exception:  # a service's bug must not end the training
            if asyncio.get_running_loop().time() - began < _LIFE_S and not have_started:
                raise
            log.exception("services_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_AFTER_S):
                    await stop.wait()


async def _admit(server: DevServer, job: str, login: "asyncio.Future[BusSettings]") -> None:
    try:
        settings = await server.grant(job)
    except BusUnreachableError:
        if server.is_stopped:  # its services have failed: who comes back admits again
            return
        raise
    if not login.done():
        login.set_result(settings)


@contextlib.contextmanager
def held_for_a_job(state: StateDir, job: str) -> Generator[StateDir]:
    """The state directory, or where another process has it, one below it for this job."""
    state.create()
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(state.held())
        except CliError:
            state = StateDir(state.path / "jobs" / job)
            state.create()
            stack.enter_context(state.held())
        yield state
