"""Test whether messages to people arrive."""

import sys

import click

from everstep_services.cli.errors import Exit
from everstep_services.cli.invocation import Invocation, with_api_options
from everstep_services.cli.output import echo, print_records

COLUMNS = ["target", "is_taken", "text"]
_TARGETS = ["webhook", "slack", "pagerduty", "alertmanager"]


@click.group()
def command() -> None:
    """Test whether messages to people arrive."""


@command.command()
@click.option("--target", type=click.Choice(_TARGETS), help="Only this target; by default all.")
@with_api_options
def test(invocation: Invocation, *, target: str | None) -> None:
    """Send a test message to each target that the running service has.

    Prints what each target answered. Exits with 1 if one of them has not taken the message.
    """
    with invocation.open_api() as api:
        answers = api.post("notifications/test", {"target": target})["targets"]
    if invocation.output is None:
        for answer in answers:
            word = "ok" if answer["is_taken"] else "failed"
            echo(f"{answer['target']}: {word}, {answer['text']}")
    else:
        print_records(invocation, "notification_test", answers, COLUMNS)
    if not all(answer["is_taken"] for answer in answers):
        sys.exit(Exit.ERROR)
