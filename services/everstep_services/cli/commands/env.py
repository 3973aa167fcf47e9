"""Print what other processes need to find this machine's bus."""

import shlex

import click

from everstep_services.cli.invocation import Invocation, with_common_options


@click.command()
@with_common_options
@click.pass_obj
def command(invocation: Invocation) -> None:
    """Print the settings with which a process reaches the bus, as shell lines.

    Of the running `everstep up`, or of the settings where they name a bus:

    eval "$(everstep env)"
    """
    from everstep_services.cli.buses import service_bus

    settings = service_bus(invocation)
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
