"""Show a training that is killed twice, and goes on; or one in which a rank becomes slow."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options


@click.command()
@click.option(
    "--steps",
    type=click.IntRange(100, 1_000_000),
    metavar="N",
    help="Train for N steps; without it, until the training has recovered twice.",
)
@click.option("--slow", is_flag=True, help="Slow one rank down instead of killing any.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=0,
    help="Where its pages are; 0, the default, takes any free port.",
)
@with_common_options
def command(invocation: Invocation, *, steps: int | None, slow: bool, port: int) -> int:
    """Train a small real model on agents of this machine, and kill parts of it.

    One rank is killed first, then a whole node with its agent: a spare takes its slot. At the end a
    table shows what happened and how long each phase of the recovery took. With --slow, one rank
    waits for its data: it is named with its cause and its price, and cleared again. It needs no
    container, no root and no GPU; its data stay in a folder that it names.
    """
    if slow and steps is not None:
        raise click.UsageError("--steps does not go with --slow, which ends by itself")
    if slow:
        from everstep_services.cli.demonstration.slow_rank import demonstrate as demonstrate_slow

        return demonstrate_slow(invocation, port)
    from everstep_services.cli.demonstration.kills import demonstrate

    return demonstrate(invocation, steps, port)
