"""Say why a job failed or restarted last."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.argument("job")
@with_api_options
@click.pass_obj
def command(invocation: Invocation, *, job: str) -> None:
    """Say why a job failed or restarted last: the story of its newest incident.

    Exit code 3: nothing has gone wrong with it.
    """
    from everstep_services.cli.location import open_api
    from everstep_services.cli.story import find_incident, print_incident

    with open_api(invocation) as api:
        print_incident(invocation, find_incident(api, job, None))
