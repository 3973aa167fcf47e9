"""Show what a job's time went to, or the time of all jobs."""

from datetime import datetime

import click

from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.times import MomentParameter


@click.command()
@click.argument("job", required=False)
@click.option(
    "--since",
    type=MomentParameter(),
    metavar="MOMENT",
    help="From then on: 24h for 24 hours ago, or a time.",
)
@click.option("--until", type=MomentParameter(), metavar="MOMENT", help="Until then; now.")
@with_api_options
@click.pass_obj
def command(
    invocation: Invocation, *, job: str | None, since: datetime | None, until: datetime | None
) -> None:
    """Show what each second of a job's allocations was spent on.

    Every second is in exactly one class, and all classes sum to the wall clock. Without a job, the
    last 24 hours of all jobs are shown, with the jobs that lost the most time.
    """
    from everstep_services.cli.api.location import open_record
    from everstep_services.cli.pages.goodput import print_fleet_goodput, print_goodput

    window = {"since": since, "until": until}
    with open_record(invocation) as api:
        if job is None:
            print_fleet_goodput(invocation, api, window)
        else:
            print_goodput(invocation, api, job, window)
