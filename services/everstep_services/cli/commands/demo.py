"""Show a training that is killed twice, and goes on."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options


@click.command()
@click.option(
    "--steps",
    default=400,
    type=click.IntRange(100, 1_000_000),
    metavar="N",
    help="How long the training is (400 steps).",
)
@with_common_options
@click.pass_obj
def command(invocation: Invocation, *, steps: int) -> int:
    """Train a small real model on three agents of this machine, and kill what trains.

    First one rank, then a whole node with its agent: a spare takes its slot. At the end a table
    says what happened and how long each phase of coming back took. No container, no root, no
    GPU; what it made stays in a folder that it names.
    """
    from everstep_services.cli.demonstration.show import demonstrate

    return demonstrate(invocation, steps)
