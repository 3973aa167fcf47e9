"""A report as one page without any script. Whatever comes from outside is escaped."""

from collections.abc import Iterator
from html import escape
from importlib.resources import files

from everstep_services.cli.pages.incidents.report.sections import (
    IncidentReport,
    ReportSection,
    ReportTable,
)


def html(report: IncidentReport) -> str:
    """The page."""
    template = files("everstep_services.cli.pages.incidents.report").joinpath("page.html")
    page = template.read_text("utf-8")
    before, after = page.split("<!--BODY-->")
    head = before.replace("<!--TITLE-->", escape(report.title))
    return f"{head}{''.join(_body(report))}{after}"


def _body(report: IncidentReport) -> Iterator[str]:
    yield f"<h1>{escape(report.title)}</h1><p>{escape(report.subtitle)}</p>"
    for section in report.sections:
        yield from _section(section)


def _section(section: ReportSection) -> Iterator[str]:
    if section.title:
        yield f"<h{section.level}>{escape(section.title)}</h{section.level}>"
    if section.lines:
        kind = ' class="verdict"' if section.title == "Verdict" else ""
        yield f"<pre{kind}>{escape(chr(10).join(section.lines))}</pre>"
    if section.table is not None:
        yield from _table(section.table)


def _table(table: ReportTable) -> Iterator[str]:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.head)
    yield f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>'
    for row in table.rows:
        yield "<tr>" + "".join(f"<td>{escape(value)}</td>" for value in row) + "</tr>"
    yield "</tbody></table></div>"
