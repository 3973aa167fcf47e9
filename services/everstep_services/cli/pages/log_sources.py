"""Where lines of ranks come from: files on this node, the log store, or the record."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from everstep.sizes import size
from everstep_services.cli.api.client import Api
from everstep_services.cli.api.location import open_record
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import say
from everstep_services.cli.pages.rank_logs import (
    LogLine,
    LogSelection,
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
        api = open_record(invocation)
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
