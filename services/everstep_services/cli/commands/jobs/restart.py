"""End the round of a job and form another one."""

import click

from everstep_services.cli.invocation import NAME, Invocation
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@with_job_at_work
@click.option(
    "--round",
    "number",
    type=click.IntRange(min=0),
    help="Only if this round runs: asking twice then restarts once. By default the newest.",
)
@click.option(
    "--without",
    "nodes",
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
@click.pass_obj
def command(
    invocation: Invocation,
    *,
    job: str,
    number: int | None,
    nodes: tuple[str, ...],
    save_first: bool,
    reason: str,
) -> None:
    """End the round of a job and form another one. It does not count against the restart budget.

    Returns when rendezvous has decided.
    """
    details = {"round": number, "without_nodes": nodes, "save_first": save_first}
    fulfil(invocation, CommandRequest("restart", reason, job, details=details))
