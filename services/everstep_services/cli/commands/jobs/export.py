"""Write a job's history, with its evidence, into one file."""

import os
from contextlib import suppress
from pathlib import Path

import click

from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.cells import cell
from everstep_services.cli.errors import CliError
from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.job_argument import with_newest_job
from everstep_services.cli.output import echo, print_json, say, schema


@click.command()
@with_newest_job
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file to write (JOB.everstep).",
)
@click.option(
    "--cycle-info",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Write NVRx's cycle-info files into a folder instead: a JSON for each round.",
)
@with_api_options
def command(invocation: Invocation, *, job: str, to: Path | None, folder: Path | None) -> None:
    """Write all facts of a job, those about its nodes, and its evidence into one file.

    `everstep serve --bundle FILE` opens it on any machine. Evidence is in it as it was collected:
    protect the file like logs, stacks and environments of ranks.
    """
    from everstep_services.cli.pages.cycle_info import write_cycle_info

    if folder is not None and to is not None:
        raise click.UsageError("--cycle-info writes into its folder: it takes no --to")
    with invocation.open_record() as api:
        if folder is not None:
            write_cycle_info(invocation, api, job, folder)
            return
        export_job(invocation, api, job, to)


_SUFFIX = ".everstep"


def export_job(invocation: Invocation, api: Api, job: str, to: Path | None) -> None:
    """Write the file. One that exists is not written over."""
    place = job_path(job)
    file = to or Path(f"{job}{_SUFFIX}")
    try:
        # Readable by this user only: it holds ends of logs.
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise CliError(f"{file} exists already: name another file with --to") from None
    except OSError as error:
        raise CliError(f"{file} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(descriptor, "wb") as written:
            headers = api.download(f"{place}/export", written)
            size = written.tell()
    except BaseException:
        with suppress(OSError):
            file.unlink()
        raise
    contents = {
        "file": str(file),
        "size_bytes": size,
        "facts": int(headers.get("Everstep-Facts", 0)),
        "evidence": int(headers.get("Everstep-Evidence", 0)),
        "evidence_missing": int(headers.get("Everstep-Evidence-Missing", 0)),
    }
    if invocation.output in {"json", "jsonl"}:
        print_json({"schema": schema("bundle"), **contents})
        return
    echo(
        f"{cell(file)}: {contents['facts']} facts, {contents['evidence']} pieces of evidence, "
        f"{size / 1e6:.1f} MB"
    )
    if contents["evidence_missing"]:
        say(f"{contents['evidence_missing']} pieces of evidence are gone or could not be fetched")
    say(f"open it anywhere with: everstep serve --bundle {cell(file)}")
