"""`everstep run` without a bus: bus, services and agent in one process, as long as the job."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from everstep.bus import BusSettings
from everstep.bus.errors import BusUnreachableError
from everstep.bus.server.dev_server import DevServer
from everstep.runtime import DrainTimeoutError
from everstep.settings import DEFAULT
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.main import run_agent
from everstep_services.agent.runtime.urgent_work import end_urgent_work
from everstep_services.cli.errors import CliError
from everstep_services.cli.machine.state import StateDir
from everstep_services.cli.stack.supervisor import Ready, StackPlan, run_stack

if TYPE_CHECKING:
    from sqlalchemy import Executable

log = logging.getLogger(__name__)

_AGAIN_AFTER_S = 1.0
_LIFE_S = 10.0
_RECORDED_WITHIN_S = 20.0
"""A busy machine may still be opening history when a short job ends, and attribution judges 4 s
after the first report of an incident."""
_LOOK_EVERY_S = 0.05


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
            end_urgent_work()  # the services may still have to be imported, to record the end
            if ground.settings.origins["history.database_url"] == DEFAULT:
                await _await_record(ground.state.path / "history.db", plan)
        finally:
            stop.set()
        await services
    return code


async def _await_record(path: Path, plan: RunPlan) -> None:
    """Wait until history has recorded the end of this run, so that the record can answer.

    If the job has ended for good, wait for the verdicts on its incidents, too: nobody would reach
    them later. Never longer than `_RECORDED_WITHIN_S` for each: facts that are not in the record by
    then wait in the files of the bus, and the next start adds them.
    """
    # Imported only here: the warden starts after all other imports, and ranks wait for it.
    from sqlalchemy import func, select

    from everstep.store import tables

    jobs, allocations, incidents = tables.jobs.c, tables.allocations.c, tables.incidents.c
    has_ended = select(jobs.job).where(jobs.job == plan.job, jobs.ended_us.is_not(None))
    of_allocation = select(allocations.job).where(
        allocations.job == plan.job,
        allocations.allocation == plan.allocation,
        allocations.ended_us.is_not(None),
    )
    unjudged = select(incidents.job).where(
        incidents.job == plan.job,
        incidents.verdict_fact.is_(None),
        func.coalesce(incidents.outcome, "") != "merged",
    )
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_RECORDED_WITHIN_S):
            await _await_row(path, has_ended.union_all(of_allocation))
        async with asyncio.timeout(_RECORDED_WITHIN_S):
            await _await_row(path, select(1).where(~(has_ended.exists() & unjudged.exists())))


async def _await_row(path: Path, query: "Executable") -> None:
    """Wait until the record has a row that the query asks for."""
    from sqlalchemy.exc import SQLAlchemyError

    from everstep.store.errors import StoreError
    from everstep.store.record_file import RecordFile, has_log

    while True:
        if has_log(path):  # history has opened it
            record = RecordFile(path)
            try:
                async with record.read() as connection:
                    if (await connection.execute(query)).first() is not None:
                        return
            except (StoreError, SQLAlchemyError):  # its schema is not there yet
                pass
            finally:
                await record.close()
        await asyncio.sleep(_LOOK_EVERY_S)


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
        except Exception as error:  # a service's bug must not end the training
            cut_off = _cut_off(error)
            if stop.is_set() and cut_off:
                log.warning("services_cut_off reason=%r", cut_off)
                return
            if asyncio.get_running_loop().time() - began < _LIFE_S and not have_started:
                raise
            log.exception("services_failed")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_AFTER_S):
                    await stop.wait()


def _cut_off(error: BaseException) -> str:
    """What did not finish in time after the stop; empty where something else failed, too."""
    if isinstance(error, BaseExceptionGroup):
        texts = [_cut_off(inner) for inner in error.exceptions]
        return "; ".join(texts) if all(texts) else ""
    return str(error) if isinstance(error, DrainTimeoutError) else ""


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
