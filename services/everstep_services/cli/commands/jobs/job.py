"""Show a job: its rounds, its nodes, and what went wrong last."""

import click

from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.job_argument import with_newest_job


@click.group(cls=ShowGroup)
def command() -> None:
    """Show a job: its rounds, its nodes, and what went wrong last."""


@command.command()
@with_newest_job
@with_api_options
def show(invocation: Invocation, *, job: str) -> None:
    """Show the state of a job, its last rounds, its nodes, and its last incidents."""
    from everstep_services.cli.pages.jobs import print_job

    with invocation.open_record() as api:
        print_job(invocation, api, job)
