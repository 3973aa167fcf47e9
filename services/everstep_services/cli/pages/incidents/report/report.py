"""Puts a report together: what the record has, and what the evidence says."""

from everstep import __version__
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, outcome
from everstep_services.cli.output import cell
from everstep_services.cli.pages.incidents.report.evidence import collect
from everstep_services.cli.pages.incidents.report.html import html
from everstep_services.cli.pages.incidents.report.markdown import markdown
from everstep_services.cli.pages.incidents.report.sections import Report, sections


def report_of(api: Api, incident: Record, form: str) -> str:
    """The whole file, as `html` or `md`."""
    report = Report(
        title=f"Incident {cell(incident['incident'])} of {cell(incident['job'])}",
        subtitle=f"{outcome(incident)}; written by everstep {__version__}",
        sections=list(sections(incident, collect(api, incident))),
    )
    return html(report) if form == "html" else markdown(report)
