"""Find slow ranks, with cause and price."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, assert_never, get_args

import click

from everstep.slow_rank_causes import SlowRankCause
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import (
    NAME,
    Invocation,
    NumberRange,
    with_formats,
    with_wide_api_options,
)
from everstep_services.cli.job_argument import with_newest_job

if TYPE_CHECKING:
    from everstep_services.straggler.domain.report import TraceReport

_UNITS = ("s", "ms", "us", "ns")
_FILE = click.Path(path_type=Path)


_MEASURES = ("own", "ratio", "waited", "step", "cpu", "runnable", "round_trip")
_EVERY_S = 2.0
LARGE_BYTES = 16 << 20
"""Traces of this size take long enough that a person wonders."""
_UNJUDGED, _NAMED = 1, 3
"""Exit codes of `analyze`, the same as those of the other commands with this name."""
_PAST_ONLY = ("state", "cause", "node", "rank", "round")


@click.group(cls=ShowGroup)
def command() -> None:
    """Find slow ranks, with cause and price.

    `everstep stragglers JOB` is short for `everstep stragglers show JOB`.
    """


@command.command()
@with_newest_job
@click.option("--history", is_flag=True, help="Show all findings so far, the newest first.")
@click.option("--timings", is_flag=True, help="Show a heat map of ranks and windows.")
@click.option("-w", "--watch", is_flag=True, help="Update the list until Ctrl-C.")
@click.option("--role", default="", metavar="NAME", help="Compare only this role group.")
@click.option(
    "--state", type=click.Choice(["open", "cleared"]), help="With --history: only in this state."
)
@click.option(
    "--cause",
    multiple=True,
    type=click.Choice(get_args(SlowRankCause)),
    help="With --history: only this cause; may be given several times.",
)
@click.option("--node", type=NAME, help="With --history: only on this node.")
@click.option("--rank", type=click.IntRange(0), help="With --history: only this rank.")
@click.option("--round", type=click.IntRange(0), help="With --history: only in this round.")
@click.option(
    "--measure", type=click.Choice(_MEASURES), help="With --timings: the measure to show (own)."
)
@click.option("--section", metavar="NAME", help="With --timings: the time in this section.")
@click.option(
    "-n", "--limit", type=click.IntRange(1), default=100, help="At most N ranks or findings (100)."
)
@with_wide_api_options
def show(invocation: Invocation, /, *, watch: bool, **asked: Any) -> None:
    """Compare the ranks of a job: which are slow now, why, and the time that they cost.

    OWN is the time that a rank itself needs for a step, SLOWER how much more that is than the
    median of its role group, LATE by how much it enters collectives after the others, and WAITS
    how long it waits for others. --history shows every finding, from the record.
    """
    from everstep_services.cli.output import say
    from everstep_services.cli.pages.ranks import watch_ranks
    from everstep_services.cli.pages.stragglers import job as job_page

    view = _view(asked)
    job, most = asked["job"], asked["limit"]
    with invocation.open_api() if watch else invocation.open_record() as api:
        if api.is_record and view == "now":
            say("how the ranks compare now is known only while a service runs; past findings:")
            view = "history"

        def print_it() -> None:
            match view:
                case "now":
                    job_page.print_now(invocation, api, job, asked["role"], most)
                case "history":
                    params = {name: asked[name] for name in _PAST_ONLY}
                    params["cause"] = list(asked["cause"]) or None
                    job_page.print_past(invocation, api, job, params, most)
                case "timings":
                    params = {"measure": asked["measure"], "section": asked["section"]}
                    job_page.print_map(invocation, api, job, params, most)
                case _:
                    assert_never(view)

        if watch:
            watch_ranks(print_it, every_s=_EVERY_S)
        else:
            print_it()


def _view(asked: dict[str, Any]) -> Literal["now", "history", "timings"]:
    """Which of the three views the options ask for."""
    is_map = bool(asked["timings"] or asked["measure"] or asked["section"])
    if asked["measure"] and asked["section"]:
        raise CliError("give --measure or --section, not both", Exit.USAGE)
    past = [name for name in _PAST_ONLY if asked[name] not in {None, ()}]
    if past and not asked["history"]:
        raise CliError(f"--{past[0]} is an option of --history: add it", Exit.USAGE)
    if is_map and asked["history"]:
        raise CliError("--history and a heat map exclude each other", Exit.USAGE)
    if asked["role"] and (is_map or asked["history"]):
        raise CliError("--role is for how ranks compare now only", Exit.USAGE)
    if is_map:
        return "timings"
    return "history" if asked["history"] else "now"


@command.command()
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=_FILE)
@click.option(
    "--html",
    metavar="FILE",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the result as one self-contained web page with a heat map.",
)
@click.option(
    "--unit",
    type=click.Choice(_UNITS),
    default="s",
    show_default=True,
    help="The unit of start and duration in a table.",
)
@click.option(
    "--window",
    metavar="STEPS",
    type=click.IntRange(1, 100_000),
    help="Steps that are judged together; by default chosen by the number of steps.",
)
@click.option(
    "--slower",
    metavar="RATIO",
    type=NumberRange(0.001, 10),
    default=0.03,
    show_default=True,
    help="A rank is slow from this excess over its peers on: 0.03 is 3 %.",
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
def analyze(
    invocation: Invocation, /, *, files: tuple[Path, ...], html: Path | None, top: int, **how: Any
) -> int:
    """Judge traces of any training: which ranks are slow, why, and the time that they cost.

    FILE is a table of operations, CSV or Parquet, with the columns rank, step, op, start and
    duration, or of each rank a trace of torch.profiler or a log of NCCL's Inspector. No service is
    needed.

    Exit codes: 0 no rank is slow, 1 no rank could be judged, 2 a file is invalid or wrong usage,
    3 a slow rank is named.
    """
    from everstep_services.cli.output import print_report
    from everstep_services.cli.pages.stragglers import html as html_page
    from everstep_services.cli.pages.stragglers import text

    report, notes = _analyzed(files, **how)
    title = files[0].name if len(files) == 1 else f"{files[0].name} and {len(files) - 1} more"
    if html is not None:
        _write(html, html_page.page(report, title, notes))
    lines = text.lines(report, top, notes)
    print_report(invocation, "straggler_analysis", text.record(report, notes), lines)
    if report.findings:
        return _NAMED
    return _UNJUDGED if report.unjudged else Exit.OK


def _analyzed(
    files: tuple[Path, ...], *, unit: str, window: int | None, slower: float
) -> "tuple[TraceReport, tuple[str, ...]]":
    from everstep_services.straggler.domain.analysis import NothingToCompareError, analyze
    from everstep_services.straggler.domain.verdict import SlownessLimits
    from everstep_services.straggler.traces import read_traces

    paths = list(dict.fromkeys(files))
    _say_what_is_read(paths)
    read = read_traces(paths, unit)
    limits = SlownessLimits(found_ratio=slower, cleared_ratio=slower / 2)
    try:
        return analyze(read.table, limits, window), read.notes
    except NothingToCompareError as error:
        raise CliError(f"{files[0]}: {error}", Exit.USAGE) from error


def _say_what_is_read(paths: list[Path]) -> None:
    """Tell a person at a terminal why nothing is printed for a while."""
    from everstep.units import size
    from everstep_services.cli.output import say

    try:
        count = sum(path.stat().st_size for path in paths)
    except OSError:
        return  # the reader says which, and why
    if count >= LARGE_BYTES and sys.stderr.isatty():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        say(f"reading and comparing {paths[0].name}{more} ({size(count)}): this may take minutes")


def _write(path: Path, content: str) -> None:
    try:
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}", Exit.USAGE) from error
