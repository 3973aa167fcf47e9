"""Have the ranks of a job save at their next step."""

import click

from everstep_services.cli.invocation import Invocation
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@with_job_at_work
@with_reason
@click.pass_obj
def command(invocation: Invocation, *, job: str, reason: str) -> None:
    """Have the ranks of a job save after one of their next steps, and continue."""
    fulfil(invocation, CommandRequest("save", reason, job))
