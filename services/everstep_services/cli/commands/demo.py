"""Show facts surviving: a server, then everything, killed under load."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options


@click.command()
@click.option(
    "--facts", default=6000, type=click.IntRange(300, 1_000_000), help="How many to record."
)
@with_common_options
@click.pass_obj
def command(invocation: Invocation, *, facts: int) -> int:
    """Start everything in a new folder, record facts, and kill what lies between.

    First the NATS server, then every service at once, each while facts are being recorded.
    At the end REST must show each fact once. Nothing is left behind. Training joins the show
    when there is something that trains.
    """
    from everstep_services.cli.demonstration import demonstrate

    return demonstrate(invocation, facts)
