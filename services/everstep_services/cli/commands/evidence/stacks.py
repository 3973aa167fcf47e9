"""Name the rank that stands elsewhere than the others, from stacks."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_formats


@click.group()
def command() -> None:
    """Read stacks of ranks. Needs no service, no bus and no torch."""


@command.command()
@click.argument(
    "paths", metavar="FILE|DIR...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="How many ranks the job has: those without a stack are then missed.",
)
@click.option("--folded", "is_folded", is_flag=True, help="Print stacks for a flame graph instead.")
@with_formats(("human", "json"), "How to print; human unless told otherwise.")
@click.pass_obj
def analyze(
    invocation: Invocation,
    /,
    *,
    paths: tuple[Path, ...],
    world_size: int | None,
    is_folded: bool,
) -> int:
    """Say which rank stands elsewhere than the others, and what it does there.

    FILE is what `py-spy dump` (with --json, too) or Python's faulthandler printed of one rank, its
    name has the rank: rank_7.json, py-spy.7.txt. A folder has one file a rank, and an archive of
    evidence (.tar.gz) all ranks of a node. Stacks are a single look: use it where a job hangs.

    Exit codes: 0 no rank waits, 1 inconclusive, 2 no stacks or wrong usage, 3 a rank is named.
    """
    from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
    from everstep_services.attribution.stack_analysis.files import read_paths
    from everstep_services.attribution.stack_analysis.report import folded, lines
    from everstep_services.cli.errors import CliError, Exit
    from everstep_services.cli.output import echo, print_json, schema

    analysis = StackAnalysis(world=world_size)
    for dump in read_paths(list(dict.fromkeys(paths))):
        analysis.add(dump)
    report = analysis.report()
    if not report.ranks:
        raise CliError("; ".join(report.notes) or "there is no stack", Exit.USAGE)
    if is_folded:
        for line in folded(report):
            echo(line)
    elif invocation.output == "json":
        print_json({"schema": schema("stacks-report"), "report": report})
    else:
        for line in lines(report):
            echo(line)
    return {"nothing": 0, "inconclusive": 1, "odd_ranks": 3}[report.verdict]
