"""Write a job's history, with its evidence, into one file."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.argument("job")
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Where; JOB.everstep if not given.",
)
@with_api_options
@click.pass_obj
def command(invocation: Invocation, *, job: str, to: Path | None) -> None:
    """Write all facts of a job, those about its nodes, and its evidence into one file.

    `everstep serve --bundle FILE` opens it on any machine. Evidence is as it was collected: ends of
    logs, stacks and environments of ranks are in the file, so treat it as you treat these.
    """
    from everstep_services.cli.api.location import open_record
    from everstep_services.cli.pages.export import export_job

    with open_record(invocation) as api:
        export_job(invocation, api, job, to)
