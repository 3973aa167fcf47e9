"""Ask the ranks of a job to save at their next step."""

import click

from everstep_services.cli.invocation import Invocation
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@with_job_at_work
@with_reason
def command(invocation: Invocation, *, job: str, reason: str) -> None:
    """Ask the ranks of a job to save after one of their next steps, and continue.

    Everstep's Checkpointer does so by itself, also below a framework. Any other script saves only
    if it looks at `should_save`; the command cannot see whether it does.
    """
    fulfil(invocation, CommandRequest("save", reason, job))
