"""Stop a job on all of its nodes."""

import click

from everstep_services.cli.invocation import Invocation
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@with_job_at_work
@click.option(
    "--save/--no-save",
    "save_first",
    default=True,
    show_default=True,
    help="Give the ranks 60 s, or what rendezvous is set to, to save first.",
)
@with_reason
def command(invocation: Invocation, *, job: str, save_first: bool, reason: str) -> None:
    """Stop a job on all of its nodes: its agents exit with 93, which means not to start it again.

    Returns when rendezvous has decided. Ranks get SIGTERM and the stop grace of `everstep run`.
    """
    fulfil(invocation, CommandRequest("stop", reason, job, details={"save_first": save_first}))
