"""Name the rank that hangs, from dumps of torch's flight recorder."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_formats


@click.group()
def command() -> None:
    """Read dumps of torch's flight recorder. Needs no service, no bus and no torch."""


@command.command()
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("-p", "--prefix", help="What the files' names have before the rank.")
@click.option(
    "--pg-filters",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="List only collectives of this process group, by name or description; may be repeated.",
)
@click.option(
    "--mismatch-cap",
    "--mismatch_cap",
    "most",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="How many collectives that are not over are listed, oldest first.",
)
@click.option(
    "--allow-incomplete-ranks",
    is_flag=True,
    expose_value=False,
    help="As for torchfrtrace; here it is always so: a missing dump is evidence.",
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="How many ranks the job has, where the dumps do not say: gloo's list no groups.",
)
@click.option(
    "--readers",
    type=click.IntRange(1, 256),
    default=2,
    show_default=True,
    help="How many files are read at once.",
)
@with_formats(("human", "json"), "How to print; human unless told otherwise.")
@click.pass_obj
def analyze(  # noqa: PLR0913  an option each
    invocation: Invocation,
    /,
    *,
    folder: Path,
    prefix: str | None,
    groups: tuple[str, ...],
    most: int,
    world_size: int | None,
    readers: int,
) -> int:
    """Say which rank the others wait for, and why, from the dumps in a folder, one a rank.

    It reads what torch writes when a collective times out (TORCH_FR_DUMP_TEMP_FILE), and JSON.
    Pickles are read as data: nothing in them can run. Keep the files' times when you copy them
    (cp -p): they tell a job that hangs from one that was only asked in passing.

    Exit codes: 0 nothing is wrong, 1 inconclusive, 2 no dumps or wrong usage, 3 a culprit is named.
    """
    from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
    from everstep_services.attribution.flight_recorder.folder import find_dumps, read_dumps
    from everstep_services.attribution.flight_recorder.report import lines
    from everstep_services.cli.output import echo, print_json, schema

    analysis = FlightAnalysis(world=world_size)
    for dump in read_dumps(find_dumps(folder, prefix), readers=readers):
        analysis.add(dump)
    report = analysis.report()
    if invocation.output == "json":
        print_json({"schema": schema("flight-report"), "report": report})
    else:
        for line in lines(report, most=most, groups=groups):
            echo(line)
    return {"nothing_pending": 0, "inconclusive": 1, "culprits": 3}[report.verdict]
