"""Text for people: columns that line up, times and sizes in few characters."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from everstep_services.cli.output import cell

Record = Mapping[str, Any]

SHORT_ID = 12
"""The length of an incident's id as tables show it, which is enough to name it."""
_BAR = 30


def aligned(rows: Iterable[Sequence[object]], indent: int = 2) -> Iterator[str]:
    """Lines whose columns line up; the last column is as long as it is."""
    texts = [[cell(value) for value in row] for row in rows]
    if not texts:
        return
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    for row in texts:
        padded = (f"{text:<{width}}" for text, width in zip(row, widths, strict=True))
        yield (" " * indent + "  ".join(padded)).rstrip()


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
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"
