"""A report as Markdown. Whatever comes from outside is in a fence, or escaped."""

import re
from collections.abc import Iterator

from everstep_services.cli.pages.incidents.report.sections import (
    IncidentReport,
    ReportSection,
    ReportTable,
)

_MARKUP = re.compile(r"([\\`*_{}\[\]()<>#+.!|~&-])")
_TICKS = re.compile("`{3,}")


def markdown(report: IncidentReport) -> str:
    """The text."""
    return "\n".join(_body(report)) + "\n"


def _body(report: IncidentReport) -> Iterator[str]:
    yield f"# {_escaped(report.title)}\n"
    yield _escaped(report.subtitle)
    for section in report.sections:
        yield from _section(section)


def _section(section: ReportSection) -> Iterator[str]:
    if section.title:
        yield f"\n{'#' * section.level} {_escaped(section.title)}"
    if section.lines:
        ticks = max((len(run) for line in section.lines for run in _TICKS.findall(line)), default=2)
        fence = "`" * (ticks + 1)
        yield from (f"\n{fence}text", *section.lines, fence)
    if section.table is not None:
        yield from _table(section.table)


def _table(table: ReportTable) -> Iterator[str]:
    yield f"\n| {' | '.join(table.head)} |"
    yield "|" + "---|" * len(table.head)
    for row in table.rows:
        yield f"| {' | '.join(map(_escaped, row))} |"


def _escaped(text: str) -> str:
    return _MARKUP.sub(r"\\\1", text)
