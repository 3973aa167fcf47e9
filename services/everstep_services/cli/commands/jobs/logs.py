"""Print what the ranks of a job wrote, and find what failed first in any logs."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from everstep.units import size
from everstep_services.cli.api.client import Api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation, with_api_options, with_formats
from everstep_services.cli.job_argument import with_newest_job
from everstep_services.cli.output import print_report, say
from everstep_services.cli.pages.rank_logs import (
    STREAMS,
    LogLine,
    LogSelection,
    check_selection,
    kept_lines,
    live_lines,
    log_folder,
    not_here,
    past_lines,
    print_lines,
    rank_files,
)
from everstep_services.cli.pages.stored_logs import (
    LineSearch,
    stored_lines,
    stored_round,
    write_cycle_file,
)
from everstep_services.cli.times import MomentParameter


@click.group(cls=ShowGroup)
def command() -> None:
    """Print what the ranks of a job wrote, or find what failed first in any logs.

    `everstep logs JOB` is short for `everstep logs show JOB`.
    """


@command.command()
@with_newest_job
@click.option("--round", "number", type=click.IntRange(min=0), help="Of this round (the newest).")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only of this rank; may be given several times.",
)
@click.option("--node", type=NAME, help="Only of ranks on this node.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only what went to stdout.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only what went to stderr.")
@click.option(
    "-n", "--lines", "last", type=click.IntRange(min=1), help="Only the last N lines of each file."
)
@click.option("-f", "--follow", is_flag=True, help="Continue with new output as it is written.")
@click.option("--contains", metavar="TEXT", help="Only lines with this text.")
@click.option("--regex", metavar="PATTERN", help="Only lines in which it is found (log store).")
@click.option(
    "--since", type=MomentParameter(), metavar="MOMENT", help="Written since then (log store)."
)
@click.option(
    "--until", type=MomentParameter(), metavar="MOMENT", help="Written until then (log store)."
)
@click.option(
    "--store",
    "of_store",
    is_flag=True,
    help="From the log store, even if files are here: all nodes, by time.",
)
@click.option(
    "--cycle-file",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the round into one file as NVRx does, each line with its rank (log store).",
)
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the output of ranks is kept; by default as `everstep run` has it.",
)
@with_api_options
def show(  # noqa: PLR0913  each is an option
    invocation: Invocation,
    *,
    job: str,
    number: int | None,
    ranks: tuple[int, ...],
    node: str | None,
    stream: str | None,
    last: int | None,
    follow: bool,
    of_store: bool,
    cycle_file: Path | None,
    log_dir: Path | None,
    **search: Any,
) -> None:
    """Print what the ranks of a job wrote, each line with its node and rank before it.

    On a node that ran the round, it prints the files of that node. Elsewhere it prints the output
    of all nodes by time from the log store, if agents send it there (`everstep run --store-logs`);
    otherwise the ends of failed ranks' logs from the record, even if their node is gone.
    """
    from everstep.ids import checked_name

    if follow and last is not None:
        raise click.UsageError("-f shows everything and follows: leave out --lines")
    if follow and cycle_file is not None:
        raise click.UsageError("--cycle-file writes the output so far: leave out -f")
    if invocation.output == "name":
        raise click.UsageError("lines have no names: use -o json or jsonl")
    if follow and invocation.output == "json":
        raise click.UsageError("-f never ends: use -o jsonl")
    wanted = LogSelection(
        checked_name("job", job), number, ranks, node, (stream,) if stream else STREAMS, last
    )
    request = LogRequest(
        wanted,
        LineSearch(**search),
        log_dir,
        is_live=follow,
        of_store=of_store,
        cycle_file=cycle_file,
    )
    print_logs(invocation, request)


@command.command()
@click.argument(
    "files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="How many ranks the job has; by default as many as the logs mention.",
)
@with_formats(("human", "json"), "How to print (human).")
def analyze(invocation: Invocation, /, *, files: tuple[Path, ...], world_size: int | None) -> int:
    """Name what failed first, on which rank, and why, from logs of any training.

    FILE is a log of one rank or of many, of any launcher, or - for stdin: the rank is known by
    prefixes of torchrun, srun, mpirun, kubectl, Ray and our own, or by the file's name. No service
    is needed. What follows from the end of another rank is never the cause. Gzip is read; other
    compressed files have to be unpacked first.

    Exit codes: 0 no failure, 1 inconclusive, 2 nothing could be read or wrong usage, 3 a cause is
    named.
    """
    from everstep_services.attribution.log_analysis.files import analyze_files
    from everstep_services.attribution.log_analysis.report import lines

    analysis = analyze_files(list(dict.fromkeys(files)), world_size)
    report = analysis.report()
    if not analysis.bytes and report.notes:
        raise CliError("; ".join(report.notes), Exit.USAGE)
    print_report(invocation, "log-report", {"report": report}, lines(report))
    return {"nothing": 0, "inconclusive": 1, "cause": 3}[report.verdict]


@dataclass(frozen=True, slots=True)
class LogRequest:
    """Which lines, from where, and what becomes of them."""

    wanted: LogSelection
    search: LineSearch
    log_dir: Path | None = None
    is_live: bool = False
    of_store: bool = False
    """From the log store also where files are here: of all nodes, by time."""
    cycle_file: Path | None = None
    """Write NVRx's file of a cycle there."""

    @property
    def needs_store(self) -> bool:
        """Files on this node do not do."""
        return self.of_store or self.search.needs_store or self.cycle_file is not None


def print_logs(invocation: Invocation, request: LogRequest) -> None:
    """Print it. Raises what says where else to look, when it is not to be had here."""
    wanted, folder = request.wanted, log_folder(invocation, request.log_dir)
    if not request.needs_store:
        if request.is_live and (folder / wanted.job).is_dir():
            lines = _containing(live_lines(folder, wanted), request.search)
            print_lines(invocation, wanted.job, lines, is_live=True)
            return
        files = [] if request.is_live else rank_files(folder, wanted)
        if files:
            lines = _containing(past_lines(files, wanted.last), request.search)
            print_lines(invocation, wanted.job, lines)
            return
    try:
        api = invocation.open_record()
    except CliError as error:
        if error.code is not Exit.UNREACHABLE or request.needs_store:
            raise
        raise not_here(folder, wanted) from error
    with api:
        _print_elsewhere(invocation, api, request, folder)


def _print_elsewhere(invocation: Invocation, api: Api, request: LogRequest, folder: Path) -> None:
    wanted, number = request.wanted, _stored_round(api, request)
    if number is not None:
        wanted = replace(wanted, round=number)
        check_selection(api, wanted, number)
        if request.cycle_file is not None:
            written = write_cycle_file(api, wanted, request.search, request.cycle_file)
            say(f"round {number} of {wanted.job}: {size(written)} in {request.cycle_file}")
            return
        lines = stored_lines(api, wanted, request.search, is_live=request.is_live)
        print_lines(invocation, wanted.job, lines, is_live=request.is_live)
        return
    if request.needs_store:
        which = wanted.job if wanted.round is None else f"round {wanted.round} of {wanted.job}"
        raise CliError(
            f"there is no output of {which} in the log store: start its agents with "
            f"`everstep run --store-logs`, or set agent.store_logs = true",
            Exit.NOT_FOUND,
        )
    if request.is_live:
        raise not_here(folder, wanted)
    lines = _containing(kept_lines(api, wanted), request.search)
    print_lines(invocation, wanted.job, lines)


def _stored_round(api: Api, request: LogRequest) -> int | None:
    """The round in the store; None also where there is no store to ask, and another source."""
    try:
        return stored_round(api, request.wanted)
    except CliError as error:
        is_none = error.code in {Exit.NOT_FOUND, Exit.UNREACHABLE}
        if request.needs_store or request.is_live or not is_none:
            raise
        return None


def _containing(lines: Iterable[LogLine], search: LineSearch) -> Iterator[LogLine]:
    wanted = search.contains
    return (line for line in lines if wanted is None or wanted in line.text)
