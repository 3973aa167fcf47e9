"""End the round of a job and form another one."""

from typing import Any

import click

from everstep_services.cli.invocation import NAME, Invocation
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@with_job_at_work
@click.option(
    "--round",
    type=click.IntRange(min=0),
    help="Only if this round runs: asking twice then restarts once. By default the newest.",
)
@click.option(
    "--without",
    "without_nodes",
    type=NAME,
    multiple=True,
    metavar="NODE",
    help="Restart without this node, which leaves the job; may be given several times.",
)
@click.option(
    "--save/--no-save",
    "save_first",
    default=False,
    show_default=True,
    help="Give the ranks 60 s, or what rendezvous is set to, to save first.",
)
@with_reason
def command(invocation: Invocation, /, *, job: str, reason: str, **details: Any) -> None:
    """End the round of a job and form another one. It does not count against the restart budget.

    Returns when rendezvous has decided.
    """
    fulfil(invocation, CommandRequest("restart", reason, job, details=details))
