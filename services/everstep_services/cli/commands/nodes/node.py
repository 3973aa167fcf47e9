"""Show a node, keep it out, let it in again, or have it examined."""

import click

from everstep.subjects import CLUSTER
from everstep_services.cli.errors import Exit
from everstep_services.cli.group import ShowGroup
from everstep_services.cli.invocation import NAME, Invocation, NumberRange, with_api_options
from everstep_services.cli.operator_requests import (
    CommandRequest,
    ExclusionRequest,
    fulfil,
    with_reason,
)
from everstep_services.cli.times import SpanParameter


@click.group(cls=ShowGroup)
def command() -> None:
    """Show a node, keep it out, let it in again, or have it examined."""


@command.command()
@click.argument("node", type=NAME)
@with_api_options
def show(invocation: Invocation, *, node: str) -> None:
    """Show the state of a node, the reason for it, and the results of its last checks."""
    from everstep_services.cli.pages.nodes import print_node

    with invocation.open_record() as api:
        print_node(invocation, api, node)


@command.command()
@click.argument("node", type=NAME)
@click.option("--for", "ttl_s", type=SpanParameter(), metavar="SPAN", help="How long, as 24h.")
@click.option("--for-good", is_flag=True, help="Until somebody includes it again.")
@click.option("--force", is_flag=True, help="Exclude a node that has not joined yet, too.")
@with_reason
def exclude(
    invocation: Invocation,
    *,
    node: str,
    ttl_s: int | None,
    for_good: bool,
    force: bool,
    reason: str,
) -> None:
    """Keep a node out of all rounds, by default for the time in health's settings.

    A running round continues on it: `everstep drain` removes it. A name that no node has is
    refused, unless --force says that the node is yet to join.
    """
    if for_good and ttl_s is not None:
        raise click.UsageError("--for and --for-good exclude each other")
    details = {"ttl_s": 0.0 if for_good else ttl_s}
    wish = ExclusionRequest("exclude", reason, CLUSTER, node=node, details=details, is_forced=force)
    fulfil(invocation, wish)


@command.command()
@click.argument("node", type=NAME)
@with_reason
def include(invocation: Invocation, *, node: str, reason: str) -> None:
    """Let a node join again, no matter who excluded it."""
    fulfil(invocation, CommandRequest("include", reason, CLUSTER, node=node))


@command.command()
@click.argument("node", type=NAME)
@click.argument("names", type=NAME, nargs=-1, metavar="[CHECK]...")
@click.option("--job", type=NAME, help="Its job; by default the one that it takes part in.")
@click.option(
    "--within",
    "within_s",
    type=NumberRange(min=0, min_open=True),
    default=90.0,
    metavar="SECONDS",
    help="Wait this long for the result (90).",
)
@with_reason
def check(
    invocation: Invocation,
    *,
    node: str,
    names: tuple[str, ...],
    job: str | None,
    within_s: float,
    reason: str,
) -> int:
    """Have a node's agent examine it now, during the training, and print the results.

    Without the name of a check, all checks run that may run during a training. Exit codes: 0
    healthy, 1 a check has failed, 5 no answer in time.
    """
    from everstep_services.cli.api.location import find_api
    from everstep_services.cli.output import say
    from everstep_services.cli.pages.nodes import await_check, newest_check, print_check

    wish = CommandRequest("check", reason, job, node=node, details={"checks": names})
    place = find_api(invocation)
    if place is None:
        fulfil(invocation, wish)
        say("what it finds comes as facts; only the API shows them")
        return Exit.OK
    with place.open() as api:
        before = newest_check(api, node)
        say(str(wish.tell(api)["text"]))
        result = await_check(api, node, before, within_s)
    print_check(invocation, result)
    return Exit.ERROR if result["is_healthy"] is False else Exit.OK
