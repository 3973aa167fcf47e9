"""Take a node out of its job; a spare takes its slot."""

import click

from everstep_services.cli.invocation import NAME, Invocation, NumberRange
from everstep_services.cli.operator_requests import CommandRequest, fulfil, with_reason


@click.command()
@click.argument("node", type=NAME)
@click.option(
    "--job", type=NAME, help="The job that it leaves; by default the one that it takes part in."
)
@click.option(
    "--save-within",
    "within_s",
    type=NumberRange(min=0, max=86400),
    metavar="SECONDS",
    help="Give the ranks this time to save first; by default the round ends at once.",
)
@with_reason
def command(
    invocation: Invocation, *, node: str, job: str | None, within_s: float | None, reason: str
) -> None:
    """Take a node out of its job; a spare takes its slot in the next round.

    Its agent exits with 0 if the others can continue without it, otherwise with 90.
    """
    details = {"within_s": within_s}
    fulfil(invocation, CommandRequest("drain", reason, job, node=node, details=details))
