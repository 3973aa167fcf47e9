"""Find slow ranks, with cause and price."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation, with_formats

if TYPE_CHECKING:
    from everstep_services.straggler.domain.report import Report

_UNITS = ("s", "ms", "us", "ns")
_FILE = click.Path(path_type=Path)


@click.group()
def command() -> None:
    """Find slow ranks, with cause and price."""


@command.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=_FILE)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write a page with a heat map, that needs nothing else.",
)
@click.option(
    "--unit",
    type=click.Choice(_UNITS),
    default="s",
    show_default=True,
    help="What start and duration of a table are in.",
)
@click.option(
    "--window",
    metavar="STEPS",
    type=click.IntRange(1, 100_000),
    help="Steps that are judged together; from the number of steps, if not given.",
)
@click.option(
    "--slower",
    metavar="RATIO",
    type=click.FloatRange(0.001, 10),
    default=0.03,
    show_default=True,
    help="How much slower than its peers a slow rank is, at least.",
)
@click.option(
    "--top",
    metavar="N",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="How many of the worst and of the best ranks to print.",
)
@with_formats(("text", "json"), "Text for people (the default), or JSON with everything.")
@click.pass_obj
def analyze(
    invocation: Invocation, /, *, files: tuple[Path, ...], html: Path | None, top: int, **how: Any
) -> int:
    """Judge traces of any training: who is slow, why, and what it costs.

    FILE is a table of operations, CSV or Parquet, with the columns rank, step, op, start and
    duration, or a trace of torch.profiler, one file a rank. No service is needed. Exit code 1 when
    a slow rank was found, 0 when none was.
    """
    from everstep_services.cli.output import print_json, schema
    from everstep_services.cli.stragglers import page, text

    report, notes = _analyzed(files, **how)
    title = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    if html is not None:
        _write(html, page.html(report, title, notes))
    if invocation.output == "json":
        print_json({"schema": schema("straggler_analysis"), **text.record(report, notes)})
    else:
        for line in text.lines(report, top, notes):
            click.echo(line)
    return Exit.ERROR if report.findings else Exit.OK


def _analyzed(
    files: tuple[Path, ...], *, unit: str, window: int | None, slower: float
) -> "tuple[Report, tuple[str, ...]]":
    from everstep_services.straggler.domain.analysis import NothingToCompareError, analyze
    from everstep_services.straggler.domain.verdict import Limits
    from everstep_services.straggler.traces import read_traces

    read = read_traces(list(dict.fromkeys(files)), unit)
    limits = Limits(found_ratio=slower, cleared_ratio=slower / 2)
    try:
        return analyze(read.table, limits, window), read.notes
    except NothingToCompareError as error:
        raise CliError(f"{files[0]}: {error}", Exit.USAGE) from error


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}", Exit.USAGE) from error
