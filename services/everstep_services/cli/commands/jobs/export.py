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
@click.option(
    "--cycle-info",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write NVRx's cycle-info files into a folder instead: a JSON for each round.",
)
@with_api_options
@click.pass_obj
def command(invocation: Invocation, *, job: str, to: Path | None, folder: Path | None) -> None:
    """Write all facts of a job, those about its nodes, and its evidence into one file.

    `everstep serve --bundle FILE` opens it on any machine. Evidence is as it was collected: ends of
    logs, stacks and environments of ranks are in the file, so treat it as you treat these.
    """
    from everstep_services.cli.api.location import open_record
    from everstep_services.cli.pages.cycle_info import write_cycle_info
    from everstep_services.cli.pages.export import export_job

    if folder is not None and to is not None:
        raise click.UsageError("--cycle-info writes into its folder: it takes no --to")
    with open_record(invocation) as api:
        if folder is not None:
            write_cycle_info(invocation, api, job, folder)
            return
        export_job(invocation, api, job, to)
