"""Show an incident: who failed and why, what was decided, where the time went."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.group()
def command() -> None:
    """Show an incident: who failed and why, what was decided, where the time went."""


@command.command()
@click.argument("job")
@click.argument("incident", required=False)
@with_api_options
@click.pass_obj
def show(invocation: Invocation, *, job: str, incident: str | None) -> None:
    """Show an incident of a job, by its id or the beginning of it; without one, the newest."""
    from everstep_services.cli.location import open_api
    from everstep_services.cli.story import find_incident, print_incident

    with open_api(invocation) as api:
        print_incident(invocation, find_incident(api, job, incident))
