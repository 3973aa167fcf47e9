"""List incidents: what went wrong, where, and how long it took to be back."""

from datetime import datetime

import click

from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.times import MomentParameter


@click.command()
@click.argument("job", type=NAME, required=False)
@click.option("--open", "is_open", is_flag=True, help="Only open incidents.")
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
@click.pass_obj
def command(  # noqa: PLR0913  each is an option
    invocation: Invocation,
    *,
    job: str | None,
    is_open: bool,
    outcome: tuple[str, ...],
    node: str | None,
    since: datetime | None,
    limit: int,
) -> None:
    """List incidents, of one job or of all, the newest first."""
    from everstep_services.cli.api.location import open_record
    from everstep_services.cli.pages.jobs import print_incidents

    asked = {
        "open": "true" if is_open else None,
        "outcome": list(outcome) or None,
        "node": node,
        "since": None if since is None else since.isoformat(),
    }
    with open_record(invocation) as api:
        print_incidents(invocation, api, job, asked, limit)
