"""Start `everstep up` in the background, and return when it is ready or has failed."""

import os
import subprocess
import sys

import click

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import StateDir, find_state_dir
from everstep_services.cli.output import say

_LAST_LINES = 5


def detached(invocation: Invocation, api_port: int | None, bus_host: str) -> int:
    """Print the announcement of `up` once it is ready; its last lines if it fails."""
    state = find_state_dir(invocation.environ, invocation.state_dir)
    state.create()
    read, write = os.pipe()
    command = [
        *(sys.executable, "-m", "everstep_services.cli", "up"),
        *("--state-dir", str(state.path), "--report-to", str(write)),
        *("--bus-host", bus_host),
        *_flags(invocation, api_port),
    ]
    with os.fdopen(read) as report, state.log_file.open("a") as log:
        state.log_file.chmod(0o600)
        process = subprocess.Popen(  # noqa: S603  ourselves
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            pass_fds=[write],
            start_new_session=True,
        )
        os.close(write)
        report_text = report.read()  # ends when it is ready, and when it has failed
    if report_text:
        click.echo(report_text, nl=False)
        say(f"it runs as pid {process.pid}, logs into {state.log_file}; stop it: everstep down")
        process.returncode = 0  # it is meant to outlive us
        return Exit.OK
    code = process.wait()
    raise CliError(_last_lines(state), Exit(code) if code in set(Exit) else Exit.ERROR)


def _flags(invocation: Invocation, api_port: int | None) -> list[str]:
    flags: list[str] = []
    if invocation.config is not None:
        flags += ["--config", str(invocation.config.absolute())]
    if invocation.output is not None:
        flags += ["--output", invocation.output]
    if api_port is not None:
        flags += ["--api-port", str(api_port)]
    return flags


def _last_lines(state: StateDir) -> str:
    lines = state.log_file.read_text(errors="replace").splitlines()[-_LAST_LINES:]
    last = lines[-1].removeprefix("everstep: ") if lines else "it said nothing"
    return f"up failed: {last} (see {state.log_file})"
