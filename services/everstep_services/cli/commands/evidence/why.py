"""Say why a job failed or restarted last, or why an incident happened."""

import click

from everstep_services.cli.invocation import NAME, Invocation, with_api_options


@click.command()
@click.argument("named", type=NAME, metavar="[JOB|INCIDENT]", required=False)
@with_api_options
def command(invocation: Invocation, *, named: str | None) -> None:
    """Explain the newest incident of a job: the verdict, what happened, and what followed.

    Without an argument the job is the newest one. The id of an incident, or its beginning as
    `everstep incidents` shows it, names an older incident. If a slow rank was the reason to stop
    the job, or is all that happened to it, the story is about that rank; if the job gave up, as
    when too few nodes joined, it is about that. Exit code 3: the job has had no incident; its saves
    may have failed, and then the line names them.
    """
    from everstep_services.cli.errors import CliError, Exit
    from everstep_services.cli.job_argument import newest_job
    from everstep_services.cli.output import print_page
    from everstep_services.cli.pages.incidents.story import (
        find_any_incident,
        find_given_up,
        find_incident,
        find_slow_job,
        given_up_lines,
        is_incident_id,
        slow_job_lines,
        story,
    )

    with invocation.open_record() as api:
        if named is None:
            named = newest_job(api)
        try:
            slow = find_slow_job(api, named)
        except CliError as error:
            if error.code is not Exit.NOT_FOUND or not is_incident_id(named):
                raise
            print_page(invocation, "incident", find_any_incident(api, named), story)
            return
        if slow is not None:
            print_page(invocation, "job", slow, slow_job_lines)
        elif (ended := find_given_up(api, named)) is not None:
            print_page(invocation, "job", ended, given_up_lines)
        else:
            print_page(invocation, "incident", find_incident(api, named, None), story)
