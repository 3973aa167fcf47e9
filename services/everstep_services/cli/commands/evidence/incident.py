"""Show, report or correct an incident: who failed and why, what was decided, what it cost."""

from pathlib import Path
from typing import Any

import click

from everstep.verdict_causes import VERDICT_CAUSES
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation, with_api_formats, with_api_options


@click.group(cls=ShowGroup)
def command() -> None:
    """Show, report or correct an incident: who failed and why, what was decided, what it cost."""


@command.command()
@click.argument("named", type=NAME, metavar="[JOB|INCIDENT]", required=False)
@click.argument("incident", type=NAME, required=False)
@with_api_options
def show(invocation: Invocation, *, named: str | None, incident: str | None) -> None:
    """Show an incident, by its id or the beginning of it, or the newest of a job.

    Without an argument, it is the newest incident of the newest job.
    """
    from everstep_services.cli.job_argument import newest_job
    from everstep_services.cli.output import print_page
    from everstep_services.cli.pages.incidents.story import find_incident, find_named, story

    with invocation.open_record() as api:
        named = named or newest_job(api)
        record = find_incident(api, named, incident) if incident else find_named(api, named)
        print_page(invocation, "incident", record, story)


@command.command()
@click.argument("incident", type=NAME)
@click.option(
    "--cause", required=True, type=click.Choice(VERDICT_CAUSES), help="The right cause class."
)
@click.option(
    "--rank", "ranks", multiple=True, type=click.IntRange(0), help="A rank that caused it."
)
@click.option("--node", "nodes", type=NAME, multiple=True, help="A node that caused it.")
@click.option("--note", required=True, metavar="TEXT", help="How you know, for the record.")
@with_api_options
def correct(invocation: Invocation, /, *, incident: str, **said: Any) -> None:
    """Correct the verdict about an incident; no later evidence changes a correction.

    It is stored, counted, and shown first. A correction that equals the verdict confirms it.
    """
    from everstep.subjects import is_name
    from everstep_services.cli.errors import CliError, Exit
    from everstep_services.cli.operator_requests import asker
    from everstep_services.cli.output import echo, print_record
    from everstep_services.cli.pages.incidents.story import find_any_incident

    wrong = next((node for node in said["nodes"] if not is_name(node)), None)
    if wrong is not None:
        raise CliError(f"{wrong!r} is not the name of a node: see everstep nodes", Exit.USAGE)
    with invocation.open_api() as api:
        record = find_any_incident(api, incident)
        body = {
            "cause": said["cause"],
            "culprit_ranks": said["ranks"],
            "culprit_nodes": said["nodes"],
            "reason": said["note"],
            "user": asker(),
        }
        done = api.post(f"incidents/{record['incident']}/correction", body)
    if invocation.output is None:
        echo(f"{record['incident']} of {record['job']}: {done['text']}")
    else:
        print_record(invocation, "decided", done, "job")


@command.command()
@click.argument("named", type=NAME, metavar="JOB|INCIDENT")
@click.option(
    "-f", "--file", type=click.Path(path_type=Path, dir_okay=False), help="Write it there."
)
@with_api_formats(("html", "md"), "How to write it (md).")
def report(invocation: Invocation, /, *, named: str, file: Path | None) -> None:
    """Write an incident as one self-contained file to send to a colleague.

    Given a job, it is the newest incident of the job.

    The file has the verdict, the timeline, where the time went, the position of each rank in its
    collectives, stacks, the ends of logs, and the evidence with its hashes. Known secrets are
    masked; read the file before you send it.
    """
    from everstep_services.cli.errors import CliError
    from everstep_services.cli.output import echo, say
    from everstep_services.cli.pages.incidents.report.html import html
    from everstep_services.cli.pages.incidents.report.markdown import markdown
    from everstep_services.cli.pages.incidents.report.sections import report_of
    from everstep_services.cli.pages.incidents.story import find_named

    with invocation.open_record() as api:
        document = report_of(api, find_named(api, named))
    text = html(document) if invocation.output == "html" else markdown(document)
    if file is None:
        echo(text)
        return
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        why = f"{file} cannot be written: {error.strerror}; name another with --file"
        raise CliError(why) from error
    say(f"{file}: {len(text.encode()) / 1024:.0f} KiB")
