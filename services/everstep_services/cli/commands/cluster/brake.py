"""Pull the brake: Everstep ends, stops, excludes and deletes nothing that works."""

import click

from everstep.subjects import CLUSTER
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.operator_requests import ControlRequest, fulfil, with_reason

_job = click.option("--job", type=NAME, help="Only for this job; by default for all jobs.")


@click.group(cls=ShowGroup)
def command() -> None:
    """Pull the brake: Everstep only restarts what failed; all other actions are only recorded.

    Stalls and silent nodes end no round then; see `everstep brake set --help`.
    """


@command.command(name="set")
@click.argument("state", type=click.Choice(["on", "off"]))
@_job
@with_reason
def set_(invocation: Invocation, *, state: str, job: str | None, reason: str) -> None:
    """Pull the brake (on), so that no round ends in which all ranks live; or release it (off).

    While it is on, nothing is stopped or excluded; Everstep records what it would do. A stall is an
    open incident until the ranks move again. A round that has failed, because a rank exited or the
    connection of a node's agent stays closed for 10 s, is still restarted within the job's budget:
    that harms no training that runs. A node that is only silent ends no round: if it has lost its
    power, restart the job.
    """
    _set(invocation, state, job, reason)


@command.command(hidden=True)
@_job
@with_reason
def on(invocation: Invocation, *, job: str | None, reason: str) -> None:
    """The old spelling of `set on`."""
    _set(invocation, "on", job, reason)


@command.command(hidden=True)
@_job
@with_reason
def off(invocation: Invocation, *, job: str | None, reason: str) -> None:
    """The old spelling of `set off`."""
    _set(invocation, "off", job, reason)


@command.command()
@with_api_options
def show(invocation: Invocation) -> None:
    """Show whether the brake is on, who pulled it and why, and which other switches are set."""
    from everstep_services.cli.pages.limits import print_control

    with invocation.open_api() as api:
        print_control(invocation, api)


def _set(invocation: Invocation, state: str, job: str | None, reason: str) -> None:
    details = {"changes": {"brake": state}}
    fulfil(invocation, ControlRequest("control", reason, job or CLUSTER, details=details))
