"""Name the rank that hangs, from dumps of torch's flight recorder."""

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import click

from everstep_services.cli.invocation import Invocation, with_formats

if TYPE_CHECKING:
    from collections.abc import Iterable

    from everstep_services.attribution.flight_recorder.entries import RankEntries
    from everstep_services.attribution.flight_recorder.summary import UnreadableDump


class _SeveralValues(click.Command):
    """Takes `--selected-ranks 0 2` and `--pg-filters tp dp`, as torchfrtrace does."""

    _NAMES = ("--selected-ranks", "--pg-filters")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse as click does; where that leaves words over, these belong to the option."""
        try:
            return super().parse_args(ctx, list(args))
        except click.UsageError:
            if not any(name in args for name in self._NAMES):
                raise
            return super().parse_args(ctx, self._repeated(args))

    def _repeated(self, args: list[str]) -> list[str]:
        words: list[str] = []
        name = ""
        for word in args:
            if word.startswith("-"):
                name = word if word in self._NAMES else ""
                if name:
                    continue
            words += [name, word] if name else [word]
        return words


@click.group()
def command() -> None:
    """Read dumps of torch's flight recorder. Needs no service, no bus and no torch."""


@command.command(cls=_SeveralValues)
@click.argument("folder", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("-p", "--prefix", help="The part of the files' names before the rank.")
@click.option(
    "--pg-filters",
    "groups",
    multiple=True,
    metavar="GROUP",
    help="List only collectives of these process groups, by name or description.",
)
@click.option(
    "-j",
    "--just-print-entries",
    "--just_print_entries",
    "only_prints",
    is_flag=True,
    help="Print the entries of the rings, a column for each rank, and no verdict.",
)
@click.option(
    "--selected-ranks",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="RANK",
    help="With -j: only these ranks.",
)
@click.option("-v", "--verbose", is_flag=True, help="With -j: all fields of each entry.")
@click.option(
    "--print-stack-trace",
    "--print_stack_trace",
    "has_stacks",
    is_flag=True,
    help="With -j: the stacks of the entries below them, where the dumps have any.",
)
@click.option(
    "--transform-ft",
    is_flag=True,
    help="The dumps are torchft's: default groups list the ranks of their replica group.",
)
@click.option(
    "--group-world-size",
    type=click.IntRange(min=1),
    metavar="RANKS",
    help="With --transform-ft: how many ranks a replica group has.",
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
    help="Accepted without effect: a missing dump is always evidence.",
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
@with_formats(("human", "json"), "How to print (human).")
def analyze(  # noqa: PLR0913  an option each
    invocation: Invocation,
    /,
    *,
    folder: Path,
    prefix: str | None,
    groups: tuple[str, ...],
    only_prints: bool,
    ranks: tuple[int, ...],
    verbose: bool,
    has_stacks: bool,
    transform_ft: bool,
    group_world_size: int | None,
    most: int,
    world_size: int | None,
    readers: int,
) -> int:
    """Name the rank that the others wait for, and why, from a folder with one dump for each rank.

    It reads what torch writes when a collective times out (TORCH_FR_DUMP_TEMP_FILE), and JSON.
    Pickles are read as data: nothing in them can run. Keep the files' times when you copy them
    (cp -p): they distinguish a job that hangs from a healthy one.

    Exit codes: 0 nothing is wrong, 1 inconclusive, 2 no dumps or wrong usage, 3 a culprit is named.
    """
    from everstep_services.attribution.flight_recorder.analysis import (
        FlightAnalysis,
        with_global_ranks,
    )
    from everstep_services.attribution.flight_recorder.folder import (
        find_dumps,
        read_all_entries,
        read_dumps,
    )
    from everstep_services.attribution.flight_recorder.report import lines
    from everstep_services.cli.output import print_report

    if (ranks or verbose or has_stacks) and not only_prints:
        raise click.UsageError(
            "--selected-ranks, -v and --print_stack_trace choose what -j prints: pass -j, too"
        )
    if transform_ft and not group_world_size:
        raise click.UsageError("--transform-ft needs --group-world-size")
    group_world = group_world_size or 0 if transform_ft else 0
    files, left_out = find_dumps(folder, prefix)
    if only_prints:
        dumps = read_all_entries(files, verbose=verbose, group_world=group_world)
        every = chain(dumps, left_out)
        return _print_entries(invocation, every, ranks, groups, has_stacks=has_stacks)
    analysis = FlightAnalysis(world=world_size)
    for dump in chain(left_out, read_dumps(files, readers=readers)):
        analysis.add(with_global_ranks(dump, group_world))
    report = analysis.report()
    shown = lines(report, most=most, groups=groups)
    print_report(invocation, "flight-report", {"report": report}, shown)
    return {"nothing_pending": 0, "inconclusive": 1, "culprits": 3}[report.verdict]


def _print_entries(
    invocation: Invocation,
    dumps: "Iterable[RankEntries | UnreadableDump]",
    ranks: tuple[int, ...],
    groups: tuple[str, ...],
    *,
    has_stacks: bool,
) -> int:
    from everstep_services.attribution.flight_recorder import entries
    from everstep_services.cli.output import echo, print_json, schema

    read: list[RankEntries] = []
    notes: list[str] = []
    for dump in dumps:
        if isinstance(dump, entries.RankEntries):
            read.append(dump)
        else:
            notes.append(f"{dump.name} was left out: {dump.reason}")
    shown, rows = entries.table(read, ranks, groups)
    stacks = entries.stacks(read) if has_stacks else []
    if invocation.output == "json":
        fields = {"ranks": shown, "rows": rows, "stacks": stacks, "notes": notes}
        print_json({"schema": schema("flight-entries"), **fields})
    else:
        for line in entries.lines(shown, rows):
            echo(line)
        for number, stack in enumerate(stacks):
            echo(f"stack {number}: {stack}")
        for note in notes:
            echo(f"Note: {note}.")
    return 0 if read else 2
