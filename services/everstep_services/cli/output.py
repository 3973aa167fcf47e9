"""How data is printed: tables for people, tab-separated lines for pipes, JSON for programs."""

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

import click
import msgspec

from everstep.observe.printable import printable
from everstep_services.cli.cells import Record, aligned, cell, short_cell
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation

_WIDEST = 10_000


@contextmanager
def usable(option: str) -> Generator[None]:
    """Turn what the system says about an option's file or folder into one line, with code 2."""
    try:
        yield
    except OSError as error:
        raise CliError(
            f"{option}: {error.strerror}; name a place that exists and that you may write",
            Exit.USAGE,
        ) from error


def print_records(
    invocation: Invocation, kind: str, records: Iterable[Record], columns: Sequence[str]
) -> None:
    """Print many records of a kind; the first column is what `-o name` shows.

    JSON holds the whole records under `items`, with a `schema` that changes when their
    meaning does; the other forms show the columns.
    """
    match invocation.output or usual():
        case "json":
            print_json({"schema": schema(kind), "items": list(records)})
        case "jsonl":
            for record in records:
                print_line(record)
        case "name":
            for record in records:
                echo(cell(record.get(columns[0])))
        case "table" | "wide":
            print_table(records, columns, color=wants_color(invocation))
        case _:
            for record in records:
                echo("\t".join(cell(record.get(column)) for column in columns))


def print_answer(
    invocation: Invocation,
    kind: str,
    answer: Record,
    records: Sequence[Record],
    shown: Callable[[Record], Record],
    columns: Sequence[str],
) -> None:
    """Print an answer that has records and more: JSON has all of it, the rest its records."""
    match invocation.output:
        case "json":
            print_json({"schema": schema(kind), **answer})
        case "jsonl":
            for record in records:
                print_line(record)
        case _:
            print_records(invocation, kind, map(shown, records), columns)


def print_record(invocation: Invocation, kind: str, record: Record, name: str) -> None:
    """Print one record: `key value` lines for people, an object for programs."""
    match invocation.output:
        case "json":
            print_json({"schema": schema(kind), **record})
        case "jsonl":
            print_line(record)
        case "name":
            echo(cell(record.get(name)))
        case _:
            if is_terminal():
                lines = aligned(record.items(), indent=0)
            else:
                lines = (f"{key}\t{cell(value)}" for key, value in record.items())
            for line in lines:
                echo(line)


def print_page(
    invocation: Invocation, kind: str, record: Record, page: Callable[[Record], Iterable[str]]
) -> None:
    """Print the page about one record; programs get the record, and `-o name` its id."""
    if invocation.output in {"json", "jsonl", "name"}:
        print_record(invocation, kind, record, kind)
        return
    for line in page(record):
        echo(line)


def print_report(invocation: Invocation, kind: str, report: Record, lines: Iterable[str]) -> None:
    """Print the lines of a report; programs get it as one document."""
    if invocation.output in {"json", "jsonl", "name"}:
        print_json({"schema": schema(kind), **report})
        return
    for line in lines:
        echo(line)


def print_json(value: object) -> None:
    """One JSON document, indented, in UTF-8."""
    echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def print_line(record: Record) -> None:
    """One JSON object on a line, written at once so that followers see it."""
    echo(msgspec.json.encode(record))
    sys.stdout.flush()


def print_table(records: Iterable[Record], columns: Sequence[str], *, color: bool) -> None:
    """A table as wide as the terminal, wrapped rather than cut; elsewhere as wide as it needs."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.upper().replace("_", " "), overflow="fold")
    for record in records:
        table.add_row(*(Text(short_cell(record.get(column))) for column in columns))
    width = None if is_terminal() else _WIDEST
    Console(no_color=not color, highlight=False, markup=False, width=width).print(table)


def echo(text: str | bytes, *, err: bool = False) -> None:
    """Print a text of any origin, without control characters that a terminal would obey."""
    click.echo(
        printable(text.decode(errors="replace") if isinstance(text, bytes) else text), err=err
    )


def say(text: str) -> None:
    """Talk to the person at the terminal: stdout is for data only."""
    echo(text, err=True)


def say_cut(shown: int, others: str = "") -> None:
    """A list was cut: that must not look like all there is. Of none, no larger -n shows more."""
    if shown:
        say(f"only {shown} are shown, and there are more: -n {10 * shown} shows more{others}")


def schema(kind: str) -> str:
    """The name and version of a kind of record, as in `everstep.fact/v1`."""
    return f"everstep.{kind}/v1"


def wants_color(invocation: Invocation) -> bool:
    """Whether a person would see colour and has not declined it."""
    return is_terminal() and invocation.color and not invocation.environ.get("NO_COLOR")


def is_terminal() -> bool:
    return sys.stdout.isatty()


def usual() -> str:
    """How lists are printed without `--output`."""
    return "table" if is_terminal() else "plain"
