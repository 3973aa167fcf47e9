"""Show how the ranks of a job are now: state, step, section, and the limit there."""

from typing import Any

import click

from everstep_services.cli.invocation import NAME, Invocation, with_wide_api_options
from everstep_services.cli.job_argument import with_newest_job


@click.command()
@with_newest_job
@click.option("--state", multiple=True, help="Only in this state, as stalled; may be repeated.")
@click.option("--node", type=NAME, help="Only on this node.")
@click.option("-w", "--watch", is_flag=True, help="Update the list every second, until Ctrl-C.")
@click.option("-n", "--limit", type=click.IntRange(1), default=1000, help="At most N ranks (1000).")
@with_wide_api_options
def command(invocation: Invocation, /, *, job: str, watch: bool, limit: int, **asked: Any) -> None:
    """Show the present state of a job's ranks, from the latest beats of their agents.

    Since is how long the rank has been in its section, or without progress if it is in none; age is
    how long ago its agent was heard. A stale view is marked, with the reason.
    """
    from everstep_services.cli.pages.ranks import print_ranks, watch_ranks

    with invocation.open_api() as api:
        if watch:
            watch_ranks(lambda: print_ranks(invocation, api, job, asked, limit), every_s=1.0)
        else:
            print_ranks(invocation, api, job, asked, limit)
