"""Print what other processes need to find this machine's bus."""

import shlex

import click

from everstep_services.cli.invocation import NAME, Invocation, with_common_options


@click.command()
@click.option("--job", type=NAME, help="Log in as the agents of this job, and not as a service.")
@with_common_options
def command(invocation: Invocation, job: str | None) -> None:
    """Print the settings with which a process reaches the bus, as shell lines.

    The bus is that of the running `everstep up`, or of the settings:

    eval "$(everstep env)"

    By default the login is that of a service, which may record facts of every job: for programs of
    your own. For a training that Everstep only watches, use the login of its job.
    """
    from everstep_services.cli.machine.bus_settings import agents_bus, service_bus

    settings = service_bus(invocation) if job is None else agents_bus(invocation, job)
    lines = {
        "EVERSTEP_BUS__URL": settings.url,
        "EVERSTEP_BUS__USER": settings.user,
        "EVERSTEP_BUS__PASSWORD_FILE": settings.password_file,
        "EVERSTEP_BUS__CREDENTIALS_FILE": settings.credentials_file,
        "EVERSTEP_BUS__NKEY_SEED_FILE": settings.nkey_seed_file,
        "EVERSTEP_BUS__CA_FILE": settings.ca_file,
    }
    for name, value in lines.items():
        if value is not None:
            click.echo(f"export {name}={shlex.quote(str(value))}")
