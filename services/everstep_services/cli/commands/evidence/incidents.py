"""List incidents: what went wrong, where, and how long it took to be back."""

from datetime import datetime
from typing import Any

import click

from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.times import MomentParameter


@click.command()
@click.argument("job", type=NAME, required=False)
@click.option("--open", flag_value="true", help="Only open incidents.")
@click.option(
    "--outcome", multiple=True, help="Only with this outcome: recovered, repeated, failed …"
)
@click.option("--node", type=NAME, help="Only about this node.")
@click.option(
    "--since",
    type=MomentParameter(),
    metavar="MOMENT",
    help="Only since then: 2h for two hours ago, or a time.",
)
@click.option(
    "-n", "--limit", type=click.IntRange(min=1), default=20, help="At most N incidents (20)."
)
@with_api_options
def command(
    invocation: Invocation, /, *, job: str | None, since: datetime | None, limit: int, **asked: Any
) -> None:
    """List incidents, of one job or of all, the newest first."""
    from everstep_services.cli.pages.jobs import print_incidents

    asked["since"] = None if since is None else since.isoformat()
    with invocation.open_record() as api:
        print_incidents(invocation, api, job, asked, limit)
