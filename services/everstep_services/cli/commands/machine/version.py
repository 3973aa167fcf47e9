"""Print the version."""

import platform

import click

from everstep import __version__
from everstep_services.cli.invocation import Invocation, with_common_options
from everstep_services.cli.output import print_record


@click.command()
@with_common_options
def command(invocation: Invocation) -> None:
    """Print which Everstep this is, and the Python it runs on."""
    if invocation.output is None:
        click.echo(f"everstep {__version__}")
        return
    record = {"version": __version__, "python": platform.python_version()}
    print_record(invocation, "version", record, name="version")
