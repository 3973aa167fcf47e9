"""Show or change what is switched at run time: modes, the breaker, the brake."""

from collections import Counter

import click

from everstep.subjects import CLUSTER
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.operator_requests import ControlRequest, fulfil, with_reason


@click.group(cls=ShowGroup)
def command() -> None:
    """Show or change what is switched at run time: modes, the breaker, the brake."""


@command.command()
@click.option("--job", type=NAME, help="The switches of slow ranks in force for this job.")
@with_api_options
def show(invocation: Invocation, *, job: str | None) -> None:
    """Show every switch that was set, by whom and why, and the settings of slow ranks in force."""
    from everstep_services.cli.pages.limits import print_control

    with invocation.open_api() as api:
        print_control(invocation, api, job)


@command.command(name="set")
@click.argument("changes", nargs=-1, required=True, metavar="NAME=VALUE...")
@click.option("--job", type=NAME, help="Only for this job; by default for all jobs.")
@with_reason
def set_(invocation: Invocation, *, changes: tuple[str, ...], job: str | None, reason: str) -> None:
    """Change switches, as modes.exclude=enforce or breaker=closed.

    An empty value restores the default.
    """
    pairs = [change.partition("=") for change in changes]
    for name, equals, _ in pairs:
        if not name or not equals:
            raise click.UsageError(f"{name or '='!r} is not a change: write NAME=VALUE")
    twice = next((name for name, n in Counter(name for name, _, _ in pairs).items() if n > 1), None)
    if twice is not None:
        raise click.UsageError(f"{twice!r} is there more than once: give it one value")
    details = {"changes": {name: value for name, _, value in pairs}}
    fulfil(invocation, ControlRequest("control", reason, job or CLUSTER, details=details))
