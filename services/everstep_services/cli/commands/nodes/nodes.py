"""List nodes: which are there, healthy, suspect or excluded."""

from typing import Any

import click

from everstep.job_states import NODE_PRESENCES
from everstep_services.cli.invocation import NAME, Invocation, with_wide_api_options


@click.command()
@click.argument("job", type=NAME, required=False)
@click.option(
    "--sort",
    type=click.Choice(["node", "strikes"]),
    default="node",
    help="By name, or those with the most strikes first.",
)
@click.option("--state", type=click.Choice(NODE_PRESENCES), help="Only in this state.")
@click.option(
    "--unhealthy", "healthy", flag_value="false", help="Only nodes whose last checks have failed."
)
@click.option("--suspect", flag_value="true", help="Only nodes with evidence against them.")
@click.option("--excluded", flag_value="true", help="Only nodes that are excluded now.")
@click.option(
    "-q", "--query", "q", metavar="TEXT", help="Only nodes with this text in their name or address."
)
@click.option("-n", "--limit", type=click.IntRange(1), default=1000, help="At most N nodes (1000).")
@with_wide_api_options
def command(invocation: Invocation, /, *, limit: int, **asked: Any) -> None:
    """List nodes, of one job or of all, with the evidence against them.

    Strikes are counted over all jobs, within health's window.
    """
    from everstep_services.cli.pages.nodes import print_nodes

    with invocation.open_record() as api:
        print_nodes(invocation, api, asked, limit)
