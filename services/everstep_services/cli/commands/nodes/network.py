"""Measure the network between the nodes of a job, and name the slow link or node."""

from typing import Any

import click

from everstep_services.cli.invocation import Invocation, NumberRange
from everstep_services.cli.operator_requests import with_reason


@click.command()
@click.argument("job")
@click.argument("nodes", nargs=-1, metavar="[NODE]...")
@click.option(
    "--partners",
    type=click.IntRange(1, 64),
    default=8,
    metavar="N",
    help="Measure each node with at most N others (8).",
)
@click.option(
    "--beside-training",
    "is_beside_training",
    is_flag=True,
    help="Also where ranks run, which slows them.",
)
@click.option(
    "--within",
    "within_s",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Wait this long for the figures (5 for each partner, and 60).",
)
@with_reason
@click.pass_obj
def command(
    invocation: Invocation, /, *, job: str, within_s: float | None, reason: str, **details: Any
) -> int:
    """Have agents measure the network in pairs, and print who is slow.

    By default all nodes of the job that are there, which takes a few seconds for each partner. A
    slow node is slow with every partner, a slow link only with one: to tell them apart, a node
    needs two partners.

    Exit codes: 0 nobody is slow, 1 somebody is, 5 not all was heard in time.
    """
    from everstep_services.cli.api.location import open_api
    from everstep_services.cli.operator_requests import CommandRequest
    from everstep_services.cli.output import say
    from everstep_services.cli.pages.network import NetworkTest, await_figures, print_figures

    with open_api(invocation) as api:
        test = NetworkTest.new(api, job)
        wish = CommandRequest("measure", reason, job, details={**details, "test": test.id})
        say(str(wish.tell(api)["text"]))
        told = await_figures(api, test, within_s or 60.0 + 5.0 * details["partners"])
    return print_figures(invocation, test, told)
