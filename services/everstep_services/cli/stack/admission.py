"""Lets the agents of a job into the bus of an `everstep up` on this machine."""

import asyncio

from everstep.bus import BusSettings
from everstep.bus.auth.accounts import LoginRefusedError, Operator
from everstep.bus.auth.job_access import agents_login
from everstep.bus.errors import BusError
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.machine.state import RunningServices, StateDir

_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.05


def agent_login(state: StateDir, running: RunningServices, job: str) -> BusSettings:
    """How the agents of this job log in there; the server lets them in when this returns."""
    try:
        return asyncio.run(_agent_login(state, running, job))
    except LoginRefusedError as error:
        raise CliError(str(error), Exit.FORBIDDEN) from error


async def _agent_login(state: StateDir, running: RunningServices, job: str) -> BusSettings:
    folder = state.path / "nats"
    operator = await asyncio.to_thread(Operator.opened, folder)
    address = BusSettings(url=running.bus, reconnect_wait_s=0.1, reconnect_jitter_s=0.1)
    trouble: BusError | None = None
    try:
        async with asyncio.timeout(_WITHIN_S):
            while True:
                try:
                    return await agents_login(folder, operator, address, job)
                except BusError as error:  # it may have died, and come back
                    trouble = error
                await asyncio.sleep(_LOOK_EVERY_S)
    except TimeoutError as error:
        raise CliError(
            f"the bus of `everstep up` on {state.path} did not let the agents of job {job} in "
            f"within {_WITHIN_S:g} s: {trouble or 'no answer'}; look into {folder / 'nats.log'}",
            Exit.UNREACHABLE,
        ) from error
