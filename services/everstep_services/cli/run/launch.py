"""Runs what `everstep run` was asked for: on the bus that is there, or with one of its own."""

import asyncio
import logging
import sys
from collections.abc import Generator
from dataclasses import dataclass

import msgspec

from everstep.bus import BusSettings
from everstep.bus.auth.login import read_credentials
from everstep.bus.auth.roles import ADMIN, SERVICE, job_in
from everstep.clock import SystemClock
from everstep.errors import EverstepError
from everstep.observe.logs import configure
from everstep.observe.settings import LogSettings, ObserveSettings
from everstep.runtime import one_line
from everstep.settings import DEFAULT, Loaded
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.main import UNREACHABLE, NoControlPlaneError, run_agent
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import RunningServices, StateDir, age_ms
from everstep_services.cli.output import say
from everstep_services.cli.stack.admission import agent_login
from everstep_services.cli.stack.phases import Phases

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
    state = StateDir(plan.state_dir)
    running = state.running()
    if plan.bus is not None and not _is_of_local_up(plan.bus, running):
        _check_login(plan.bus, plan.job)
        return asyncio.run(run_agent(plan, _Known(plan.bus), environ))
    if running is not None and running.command == "up" and not plan.standalone:
        settings = agent_login(state, running, plan.job)
        _tell(plan, running, state)
        return asyncio.run(run_agent(plan, _Known(settings), environ))
    return _alone(invocation, plan, environ)


def _is_of_local_up(bus: BusSettings, running: RunningServices | None) -> bool:
    """Whether a login of the control plane is that of the `everstep up` here, as `env` prints it.

    Agents then get one of their own: scripts could use the other one for everything.
    """
    is_there = running is not None and running.command == "up" and running.bus == bus.url
    return is_there and _name_of(bus) in {ADMIN, SERVICE}


def _check_login(bus: BusSettings, job: str) -> None:
    """Refuse a login that is not of this job: its scripts have whatever the agent has."""
    name, path = _name_of(bus), bus.credentials_file
    remedy = f"`everstep bus login {job} --out FILE` makes one for its agents"
    if name in {ADMIN, SERVICE}:
        raise CliError(
            f"the login {name} ({path or 'by password'}) is one of the control plane, and scripts "
            f"could use it for everything: {remedy}; set credentials_file in [bus] to that file",
            Exit.USAGE,
        )
    if job_in(name) not in {None, job}:
        raise CliError(
            f"the login {name} ({path}) is of another job than {job}: name the job with --job; "
            f"or {remedy}",
            Exit.USAGE,
        )


def _name_of(bus: BusSettings) -> str:
    """Whose login it is; empty where only the server knows."""
    if bus.credentials_file is None:
        return bus.user or ""
    claims = read_credentials(bus.credentials_file).claims
    return "" if claims is None else claims.name


def _alone(invocation: Invocation, plan: RunPlan, environ: dict[str, str]) -> int:
    # Only here: what a bus of one's own needs takes longer to import than an agent does, and a
    # node has it only with the extras `services` and `dev-server`.
    from everstep.observe.http import listen
    from everstep_services.cli.stack.standalone import held_for_a_job, run_alone
    from everstep_services.cli.stack.supervisor import Ready, StackPlan

    phases = Phases(SystemClock(), before_ms=age_ms())
    settings = _load(invocation)
    observe = settings.section(ObserveSettings)
    with held_for_a_job(StateDir(plan.state_dir), plan.job) as state:
        remedy = "free a port on loopback"
        ground = StackPlan(
            state=state,
            settings=settings,
            api=listen("127.0.0.1", 0, remedy=remedy),
            observe=listen(observe.host, 0, remedy=remedy),
            phases=phases,
            command="run",
            report_unsent=lambda text: say(f"everstep: warning: {text}"),
        )

        def tell(ready: Ready) -> None:
            _tell(plan, ready.running, state)

        with ground.api, ground.observe:
            return asyncio.run(run_alone(ground, plan, environ, tell))


def _tell(plan: RunPlan, running: RunningServices, state: StateDir) -> None:
    where = f"{running.api}/jobs/{plan.job}"
    sys.stderr.write(f"everstep: job {plan.job}: {where}  (token in {state.token_file})\n")


def _load(invocation: Invocation) -> Loaded:
    from everstep_services.cli.stack.services import stack_sections

    return invocation.load(stack_sections())


def _configure_logs(invocation: Invocation) -> None:
    loaded = invocation.load({"log": LogSettings})
    log = loaded.section(LogSettings)
    if loaded.origins["log.level"] == DEFAULT:  # the console belongs to the ranks
        log = msgspec.structs.replace(log, level="warning")
        # A metric tells that the loop is late: on the console of ranks it helps nobody.
        logging.getLogger("everstep.observe.metrics").setLevel(logging.ERROR)
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
