"""Show what runs here, which versions, and how far history has got."""

from typing import Any

import click

from everstep import __version__
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.output import print_record, say


@click.command()
@with_api_options
def command(invocation: Invocation) -> int:
    """Show what runs here, which versions, and how far history has got.

    Exit code 4: nothing runs, or the API does not answer.
    """
    from everstep_services.cli.api.location import find_api

    state = find_state_dir(invocation.environ, invocation.state_dir)
    running = state.running()
    record: dict[str, Any] = {"cli": __version__, "state_dir": str(state.path)}
    if running is not None:
        record |= {
            "pid": running.pid,
            "version": running.version,
            "bus": running.bus,
            "nats_server": running.bus_version,
            "services": running.services,
        }
    place = find_api(invocation, waits=False)
    code = Exit.OK
    if place is None:
        code = Exit.UNREACHABLE
        starting = state.holder()
        state_text = f"is starting (pid {starting.pid})" if starting else "is not running"
        say(f"everstep up {state_text} on {state.path}, and no other API is known")
    else:
        record["api"] = place.url
        try:
            with place.open() as api:
                record["history"] = api.get("status")
        except CliError as error:
            code = error.code
            say(f"everstep: {error}")
    _print(invocation, record)
    return code


def _print(invocation: Invocation, record: dict[str, Any]) -> None:
    if invocation.output is None:
        history = record.pop("history", None) or {}
        if history.get("bundle") is None:  # a live record: there is nothing to show
            history = {name: value for name, value in history.items() if name != "bundle"}
        record |= {f"history.{name}": value for name, value in history.items()}
    print_record(invocation, "status", record, name="api")
