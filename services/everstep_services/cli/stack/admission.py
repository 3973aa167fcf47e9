"""Lets the agents of a job into the bus of an `everstep up` on this machine."""

import os
import signal
import time
from pathlib import Path

from everstep.bus import BusSettings
from everstep.bus.roles import user_for
from everstep.bus.serverconfig import admit, password_file
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.state import Running, StateDir

_WITHIN_S = 5.0
_RELOADED = b"Reloaded server configuration"


def agent_login(state: StateDir, running: Running, job: str) -> BusSettings:
    """How the agents of this job log in there; the server knows them when this returns."""
    folder, name = state.path / "nats", user_for("agent", job).name
    settings = BusSettings(
        url=running.bus,
        user=name,
        password_file=password_file(folder, name),
        reconnect_wait_s=0.1,
        reconnect_jitter_s=0.1,
    )
    config, log = folder / "nats.json", folder / "nats.log"
    if f'"{name}"'.encode() in config.read_bytes():
        return settings
    before = _reloads(log)
    admit(config, folder, name)
    os.kill(running.bus_pid, signal.SIGHUP)
    deadline = time.monotonic() + _WITHIN_S
    while _reloads(log) == before:
        if time.monotonic() > deadline:
            raise CliError(
                f"the bus of `everstep up` on {state.path} did not take the login of job {job} "
                f"within {_WITHIN_S:g} s: look into {log}",
                Exit.UNREACHABLE,
            )
        time.sleep(0.005)
    return settings


def _reloads(log: Path) -> int:
    return log.read_bytes().count(_RELOADED)
