"""Show a job: its rounds, its nodes, and what went wrong last."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.group()
def command() -> None:
    """Show a job: its rounds, its nodes, and what went wrong last."""


@command.command()
@click.argument("job")
@with_api_options
@click.pass_obj
def show(invocation: Invocation, *, job: str) -> None:
    """Show how a job is, its last rounds, who takes part, and its last incidents."""
    from everstep_services.cli.jobs_page import print_job
    from everstep_services.cli.location import open_api

    with open_api(invocation) as api:
        print_job(invocation, api, job)
