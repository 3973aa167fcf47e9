"""Run everything on this machine: bus, services and API."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options


@click.command()
@click.option(
    "--port",
    "api_port",
    type=click.IntRange(0, 65535),
    metavar="PORT",
    help="Where the API listens on this machine; 0 takes any free port.",
)
@click.option("--api-port", "api_port", type=click.IntRange(0, 65535), hidden=True)
@click.option(
    "--bus-host",
    metavar="HOST",
    default="127.0.0.1",
    help="Where the bus listens (127.0.0.1); another address lets agents of other hosts in.",
)
@click.option("--detach", is_flag=True, help="Return when it is ready, and let it run.")
@click.option("--report-to", type=int, hidden=True)
@with_common_options
def command(
    invocation: Invocation,
    *,
    api_port: int | None,
    bus_host: str,
    detach: bool,
    report_to: int | None,
) -> int:
    """Run everything on this machine: a NATS server, every service, and the API.

    For development and for one machine. Ctrl-C stops everything; the data stay in the state
    directory, and the next `everstep up` continues with them.
    """
    if detach:
        from everstep_services.cli.stack.process import detached

        return detached(invocation, api_port, bus_host)
    from everstep_services.cli.stack.process import run_up

    return run_up(invocation, api_port, bus_host, report_to)
