"""Show results that cannot be right, and how far results are deterministic."""

from typing import Any

import click

from everstep_services.cli.invocation import Invocation, with_wide_api_options
from everstep_services.cli.job_argument import with_newest_job

_KINDS = (
    "transient",
    "persistent",
    "correct_but_unexpected",
    "not_reproducible_and_not_local",
    "replica_differs",
)


@click.command()
@with_newest_job
@click.option(
    "--determinism", is_flag=True, help="Show which results differ when a step is run again."
)
@click.option(
    "--kind",
    multiple=True,
    type=click.Choice(_KINDS),
    help="Only with this judgement; may be given several times.",
)
@click.option("--round", type=click.IntRange(0), help="Only in this round.")
@click.option("-n", "--limit", type=click.IntRange(1), default=100, help="At most N rows (100).")
@with_wide_api_options
def command(invocation: Invocation, /, *, job: str, limit: int, **asked: Any) -> None:
    """Show the unexpected results of a job: what was suspected, judged and done; newest first.

    --determinism shows how often each result was compared with that of a second run of the same
    step, how often it was not the same, bit for bit, and the largest difference. -o json has both.
    """
    from everstep_services.cli.pages.numerics import print_numerics

    with invocation.open_record() as api:
        print_numerics(invocation, api, job, asked, limit)
