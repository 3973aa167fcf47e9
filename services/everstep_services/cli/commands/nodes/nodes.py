"""List nodes: which are there, healthy, suspect or excluded."""

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
@click.option("--unhealthy", is_flag=True, help="Only nodes whose last checks have failed.")
@click.option("--suspect", is_flag=True, help="Only nodes with evidence against them.")
@click.option("--excluded", is_flag=True, help="Only nodes that are excluded now.")
@click.option(
    "-q", "--query", metavar="TEXT", help="Only nodes with this text in their name or address."
)
@click.option("-n", "--limit", type=click.IntRange(1), default=1000, help="At most N nodes (1000).")
@with_wide_api_options
@click.pass_obj
def command(  # noqa: PLR0913  each is an option
    invocation: Invocation,
    *,
    job: str | None,
    sort: str,
    state: str | None,
    unhealthy: bool,
    suspect: bool,
    excluded: bool,
    query: str | None,
    limit: int,
) -> None:
    """List nodes, of one job or of all, with the evidence against them.

    Strikes are counted over all jobs, within health's window.
    """
    from everstep_services.cli.api.location import open_record
    from everstep_services.cli.pages.nodes import print_nodes

    asked = {
        "job": job,
        "sort": sort,
        "state": state,
        "healthy": "false" if unhealthy else None,
        "suspect": "true" if suspect else None,
        "excluded": "true" if excluded else None,
        "q": query,
    }
    with open_record(invocation) as api:
        print_nodes(invocation, api, asked, limit)
