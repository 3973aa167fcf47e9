"""Text for people: columns that line up, times and sizes in few characters."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import msgspec

from everstep.observe.printable import beginning, printable

Record = Mapping[str, Any]
V = TypeVar("V")

SHORT_ID = 12
"""The length of an incident's id as tables show it, which is enough to name it."""
_BAR = 30
_BLANKS = re.compile(r"[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]+")
_INSTANT = re.compile(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?Z")
_WIDEST = 1 << 20
"""Columns, so that no line is wrapped or cut."""


def cell(value: object) -> str:
    """A value on one line, without anything that a terminal would obey."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(cell, value))
    if isinstance(value, dict):
        value = msgspec.json.encode(value).decode()
    return printable(_BLANKS.sub(" ", str(value)))


def short_cell(value: object) -> str:
    """A value for a table: times to the second, all else as in `cell`."""
    text = cell(value)
    match = _INSTANT.fullmatch(text)
    return f"{match[1]} {match[2]}" if match else text


def blank_or(show: Callable[[V], str], value: V | None) -> str:
    """A value as shown by a function; empty where there is none."""
    return "" if value is None else show(value)


def listed(names: Sequence[object], most: int) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return cell(list(names[:most])) + more


def aligned(
    rows: Iterable[Sequence[object]], indent: int = 2, widths: Iterable[int] = ()
) -> Iterator[str]:
    """Lines whose columns line up, without colour; no value is cut.

    `widths` are the least widths of the first columns, for rows that are printed one by one.
    """
    from rich.console import Console
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for width in widths:
        table.add_column(min_width=width)
    for row in rows:
        table.add_row(*(Text(cell(value), no_wrap=True, overflow="ignore") for value in row))
    if not table.row_count:
        return
    console = Console(width=_WIDEST, color_system=None, legacy_windows=False)
    for line in console.render_lines(table, pad=False):
        text = "".join(segment.text for segment in Segment.filter_control(line))
        yield (" " * indent + text).rstrip()


def clean_lines(text: str) -> list[str]:
    """The lines of a text, without anything that a terminal would obey."""
    return [cell(line.expandtabs(4)) for line in text.splitlines()]


def moment(text: object) -> str:
    """A time to the second, in UTC; `-` for none."""
    return "-" if not text else f"{_parsed(text):%Y-%m-%d %H:%M:%S}"


def since(text: object, zero: object) -> float:
    """Seconds from one moment to another."""
    return (_parsed(text) - _parsed(zero)).total_seconds()


def span(seconds: float | None) -> str:
    """A length of time: `12 ms`, `1.16 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds is None:
        return "-"
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 99.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"


def bar(part: float, whole: float) -> str:
    """How much of the whole it is."""
    return "█" * round(_BAR * part / whole) if whole > 0 else ""


def outcome(incident: Record) -> str:
    """How an incident ended; `open` until then."""
    return str(incident["outcome"] or "open")


def wall_s(incident: Record) -> float | None:
    """How long an incident lasted; None while it is open."""
    ledger = incident["ledger"]
    return None if ledger is None else float(ledger["wall_s"])


def counted(count: int, noun: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def ending(exit_: Record) -> str:
    """How a rank's process ended, in a few words."""
    if exit_["signal"]:
        core = ", core dumped" if exit_["core_dumped"] else ""
        return f"ended by {exit_['signal']}{core}"
    if exit_["how"] == "out_of_memory":
        return "killed by the kernel: out of memory"
    if exit_["exit_code"] is not None:
        return f"exit code {exit_['exit_code']}"
    return str(exit_["how"])


def slow_rank(finding: Record) -> str:
    """A finding in a few words: `rank 3 (node-2, input, +30 %)`."""
    slower = finding["slower_ratio"]
    about = (finding["node"], finding["cause"], None if slower is None else percent(slower))
    return f"rank {cell(finding['rank'])} ({', '.join(cell(part) for part in about if part)})"


def percent(ratio: float) -> str:
    """A change: `+30 %`, `-2.5 %`, `0 %`."""
    number = ratio * 100
    if abs(number) < 0.05:
        return "0 %"
    return f"{number:+.0f} %" if abs(number) >= 9.95 else f"{number:+.1f} %"


def budgets(budgets_: Iterable[Record] | None) -> str:
    """`restarts 9 of 10, restarts_per_hour 3 of 4`."""
    return ", ".join(
        f"{budget['name']} {budget['left']} of {budget['limit']}" for budget in budgets_ or ()
    )


def _parsed(text: object) -> datetime:
    return datetime.fromisoformat(str(text))


def brief(text: object, most: int = 100) -> str:
    """As much of a reason as has room in a table."""
    line = cell(text)
    return beginning(line, most)
