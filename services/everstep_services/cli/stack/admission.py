"""Lets the agents of a job into the bus of an `everstep up` on this machine."""

import time

from everstep.bus import BusSettings
from everstep.bus.admitting import Admission
from everstep.bus.roles import user_for
from everstep.bus.serverconfig import password_file
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.state import Running, StateDir

_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.01


def agent_login(state: StateDir, running: Running, job: str) -> BusSettings:
    """How the agents of this job log in there; the server lets them in when this returns."""
    folder, name = state.path / "nats", user_for("agent", job).name
    admission = Admission(folder, running.bus, name)
    deadline = time.monotonic() + _WITHIN_S
    while not admission.is_let_in():
        if time.monotonic() > deadline:
            raise CliError(
                f"the bus of `everstep up` on {state.path} did not let the agents of job {job} in "
                f"within {_WITHIN_S:g} s: look into {folder / 'nats.log'}",
                Exit.UNREACHABLE,
            )
        time.sleep(_LOOK_EVERY_S)
    return BusSettings(
        url=running.bus,
        user=name,
        password_file=password_file(folder, name),
        reconnect_wait_s=0.1,
        reconnect_jitter_s=0.1,
    )
