"""Open the dashboard in a browser, logged in."""

import webbrowser
from urllib.parse import quote

import click

from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.output import print_record


@click.command()
@click.argument("job", type=NAME, required=False)
@click.option("--link", "is_link", is_flag=True, help="Only print the link; open no browser.")
@with_api_options
def command(invocation: Invocation, *, job: str | None, is_link: bool) -> None:
    """Open the dashboard in a browser, logged in; with JOB, the page of that job.

    The link is printed, too. It logs in once, within a minute.
    """
    page = "" if job is None else f"&next={quote(f'/jobs/{quote(job, safe=str())}', safe='')}"
    with invocation.open_api() as api:
        made = api.post("login-codes", {})
        link = f"{api.url}{made['path']}{page}"
    record = {"link": link, "lasts_s": made["lasts_s"]}
    print_record(invocation, "link", record, "link")
    if not is_link:
        webbrowser.open(link)
