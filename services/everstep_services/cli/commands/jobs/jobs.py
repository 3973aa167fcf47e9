"""List jobs: which train, how far they are, and what went wrong."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.option("--state", multiple=True, help="Only in this state; may be given several times.")
@click.option("--user", help="Only started by this user.")
@click.option("--label", multiple=True, metavar="NAME:VALUE", help="Only with this label.")
@click.option("-q", "--query", metavar="TEXT", help="Only jobs with this text in their id or name.")
@click.option("-n", "--limit", type=click.IntRange(min=1), default=50, help="At most N jobs (50).")
@with_api_options
@click.pass_obj
def command(
    invocation: Invocation,
    *,
    state: tuple[str, ...],
    user: str | None,
    label: tuple[str, ...],
    query: str | None,
    limit: int,
) -> None:
    """List jobs, the newest first."""
    from everstep_services.cli.api.location import NothingRecordedError, open_record
    from everstep_services.cli.output import print_records, say
    from everstep_services.cli.pages.jobs import JOB_COLUMNS, print_jobs

    asked = {"state": list(state) or None, "user": user, "label": list(label) or None, "q": query}
    try:
        with open_record(invocation) as api:
            print_jobs(invocation, api, asked, limit)
    except NothingRecordedError as nothing:
        print_records(invocation, "job", (), JOB_COLUMNS)
        say(str(nothing))
