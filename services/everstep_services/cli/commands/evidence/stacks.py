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
    help="The number of ranks of the job: ranks without a stack are then reported.",
)
@click.option("--folded", "is_folded", is_flag=True, help="Print stacks for a flame graph instead.")
@with_formats(("human", "json"), "How to print (human).")
def analyze(
    invocation: Invocation, /, *, paths: tuple[Path, ...], world_size: int | None, is_folded: bool
) -> int:
    """Name the rank that is elsewhere than the others, and what it does there.

    FILE is the output of `py-spy dump` (also with --json) or of Python's faulthandler for one
    rank; its name has the rank: rank_7.json, py-spy.7.txt. A folder has one file for each rank, an
    archive of evidence (.tar.gz) all ranks of a node. Stacks show one moment: use them for a job
    that hangs.

    Exit codes: 0 no rank waits, 1 inconclusive, 2 no stacks or wrong usage, 3 a rank is named.
    """
    from everstep_services.attribution.stack_analysis.analysis import StackAnalysis
    from everstep_services.attribution.stack_analysis.files import read_paths
    from everstep_services.attribution.stack_analysis.report import folded, lines
    from everstep_services.cli.errors import CliError, Exit
    from everstep_services.cli.output import echo, print_report

    analysis = StackAnalysis(world=world_size)
    for dump in read_paths(list(dict.fromkeys(paths))):
        analysis.add(dump)
    report = analysis.report()
    if not report.ranks:
        raise CliError("; ".join(report.notes) or "there is no stack", Exit.USAGE)
    if is_folded:
        for line in folded(report):
            echo(line)
    else:
        print_report(invocation, "stacks-report", {"report": report}, lines(report))
    return {"nothing": 0, "inconclusive": 1, "odd_ranks": 3}[report.verdict]
