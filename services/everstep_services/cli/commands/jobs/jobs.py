"""List jobs: which train, how far they are, and what went wrong."""

from typing import Any

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.option("--state", multiple=True, help="Only in this state; may be given several times.")
@click.option("--user", help="Only started by this user.")
@click.option("--label", multiple=True, metavar="NAME:VALUE", help="Only with this label.")
@click.option(
    "-q", "--query", "q", metavar="TEXT", help="Only jobs with this text in their id or name."
)
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, help="At most N jobs (50).")
@with_api_options
def command(invocation: Invocation, /, *, limit: int, **asked: Any) -> None:
    """List jobs, the newest first."""
    from everstep_services.cli.api.location import NothingRecordedError
    from everstep_services.cli.output import print_records, say
    from everstep_services.cli.pages.jobs import JOB_COLUMNS, print_jobs

    try:
        with invocation.open_record() as api:
            print_jobs(invocation, api, asked, limit)
    except NothingRecordedError as nothing:
        print_records(invocation, "job", (), JOB_COLUMNS)
        say(str(nothing))
