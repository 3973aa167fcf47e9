"""Runs what `everstep run` was asked for: on the bus that is there, or with one of its own."""

import asyncio
import logging
import sys
from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from everstep.bus import BusSettings
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.observe.logs import configure
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import one_line
from everstep.settings import DEFAULT, Loaded, Settings
from everstep_services.agent.plan import RunPlan
from everstep_services.agent.process import UNREACHABLE, NoControlPlaneError, run_agent
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.stack.admission import agent_login
from everstep_services.cli.stack.phases import Phases
from everstep_services.cli.state import Running, StateDir, age_ms

NAME = "everstep run"


def launch(invocation: Invocation, plan: RunPlan) -> int:
    """The exit code of the job, or of what kept it from starting."""
    _configure_logs(invocation)
    try:
        return _launch(invocation, plan)
    except NoControlPlaneError as error:
        return _say(error, UNREACHABLE)
    except CliError as error:
        return _say(error, UNREACHABLE if error.code is Exit.UNREACHABLE else Exit.USAGE)
    except EverstepError as error:
        return _say(error, Exit.USAGE)
    except ExceptionGroup as group:
        known, unknown = group.split(EverstepError)
        if unknown is not None or known is None:
            raise
        return _say(_first(known), Exit.USAGE)


def _launch(invocation: Invocation, plan: RunPlan) -> int:
    environ = dict(invocation.environ)
    if plan.bus is not None:
        return asyncio.run(run_agent(plan, _Known(plan.bus), environ))
    state = StateDir(plan.state_dir)
    running = state.running()
    if running is not None and running.command == "up" and not plan.standalone:
        settings = agent_login(state, running, plan.job)
        _tell(plan, running, state)
        return asyncio.run(run_agent(plan, _Known(settings), environ))
    return _alone(invocation, plan, environ)


def _alone(invocation: Invocation, plan: RunPlan, environ: dict[str, str]) -> int:
    # Only here: what a bus of one's own needs takes longer to import than an agent does, and a
    # node has it only with the extras `services` and `dev-server`.
    from everstep.observe.http import listen
    from everstep_services.cli.stack.standalone import held_for_a_job, run_alone
    from everstep_services.cli.stack.up import Ground, Ready

    phases = Phases(SystemClock(), before_ms=age_ms())
    settings = _load(invocation)
    observe = settings.section(ObserveSettings)
    with held_for_a_job(StateDir(plan.state_dir), plan.job) as state:
        remedy = "free a port on loopback"
        ground = Ground(
            state=state,
            settings=settings,
            api=listen("127.0.0.1", 0, remedy=remedy),
            observe=listen(observe.host, 0, remedy=remedy),
            phases=phases,
            command="run",
        )

        def tell(ready: Ready) -> None:
            _tell(plan, ready.running, state)

        with ground.api, ground.observe:
            return asyncio.run(run_alone(ground, plan, environ, tell))


def _tell(plan: RunPlan, running: Running, state: StateDir) -> None:
    where = f"{running.api}/api/v1/jobs/{plan.job}"
    sys.stderr.write(f"everstep: job {plan.job}: {where}  (token in {state.token_file})\n")


def _load(invocation: Invocation) -> Loaded:
    from everstep_services.cli.stack.process import stack_sections

    sections: dict[str, type[Settings]] = stack_sections()
    return invocation.load(sections)


def _configure_logs(invocation: Invocation) -> None:
    loaded = invocation.load({"log": LogSettings})
    log = loaded.section(LogSettings)
    if loaded.origins["log.level"] == DEFAULT:  # the console belongs to the ranks
        log = msgspec.structs.replace(log, level="warning")
    if loaded.origins["log.format"] == DEFAULT:
        log = msgspec.structs.replace(log, format="console")
    configure(log, "run", environ=invocation.environ)
    # What matters of what the client library says, our own connection says in one line.
    logging.getLogger("nats").setLevel(logging.CRITICAL)


@dataclass(frozen=True, slots=True)
class _Known:
    """There already; an agent that ends before it asks need not await it."""

    settings: BusSettings

    def __await__(self) -> Generator[None, None, BusSettings]:
        yield from ()
        return self.settings


def _say(error: BaseException, code: int) -> int:
    sys.stderr.write(f"{NAME}: {one_line(error)}\n")
    return code


def _first(group: BaseExceptionGroup[EverstepError]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
