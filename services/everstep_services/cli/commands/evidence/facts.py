"""List facts, or follow them as they happen."""

from typing import Any

import click

from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.times import MomentParameter


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with new ones as they happen.")
@click.option("--job", help="Only about this job.")
@click.option("--kind", multiple=True, help="Only of this kind; may be given several times.")
@click.option("--node", help="Only about this node.")
@click.option("--source", help="Only from this sender.")
@click.option("--round", "round", type=click.IntRange(min=0), help="Only of this round.")
@click.option(
    "--since",
    type=MomentParameter(),
    metavar="MOMENT",
    help="Not before: 10m for 10 minutes ago, or a time.",
)
@click.option("--until", type=MomentParameter(), metavar="MOMENT", help="Before this moment.")
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most N facts (100).")
@with_api_options
@click.pass_obj
def command(invocation: Invocation, /, *, follow: bool, **asked: Any) -> None:
    """List the newest facts, or those since a moment, the oldest first.

    With -f only what happens from now on, or since a moment. A lost connection is opened again
    where it broke off.
    """
    from everstep_services.cli.api.location import open_api, open_record
    from everstep_services.cli.pages.facts import print_live, print_past, wanted

    if follow and (asked["until"] is not None or asked["limit"] is not None):
        raise click.UsageError("-f goes on for ever: it takes no --until and no --limit")
    if follow:
        with open_api(invocation) as api:
            print_live(invocation, api, wanted(**asked))
    else:
        with open_record(invocation) as api:
            print_past(invocation, api, wanted(**asked))
