"""Make a fault on purpose, to see that the job survives it."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, NumberRange, with_common_options


@click.command()
@click.argument("fault", required=False)
@click.option("--job", metavar="ID", help="The job; it was started with --allow-injection.")
@click.option(
    "--rank",
    metavar="R|random",
    help="The global rank, or any one. Without --rank and --node: any.",
)
@click.option("--node", metavar="ID|random", help="The node, for what happens to its agent.")
@click.option(
    "--after-step", type=click.IntRange(min=0), metavar="S", help="When this step is finished."
)
@click.option(
    "--after", "after_s", type=NumberRange(min=0), metavar="SECONDS", help="After this time."
)
@click.option("--for", "for_s", type=float, metavar="SECONDS", help="How long it lasts.")
@click.option("--amount", type=int, metavar="N", help="How much; --list says of what.")
@click.option("--target", default="", metavar="NAME", help="A section, a folder; see --list.")
@click.option(
    "--scenario",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Make all faults of this TOML file, each in its time.",
)
@click.option("--seed", type=int, metavar="N", help="For `random`: the same picks again.")
@click.option("--dry-run", is_flag=True, help="Only say what would be done, and where.")
@click.option("--list", "wants_list", is_flag=True, help="Only say which faults there are.")
@with_common_options
@click.pass_obj
def command(invocation: Invocation, /, **options: object) -> int:
    """Make a fault on purpose, to see that the job survives it.

    The job must have been started with `everstep run --allow-injection`. Each fault is recorded
    as `fault_injected` before it is made, and undone when its time is over. Returns when all of
    them are made.

    Exit codes: 0 made, 1 refused, 3 no such job, rank or node, 4 no bus.
    """
    from everstep_services.cli.faults.command import InjectOptions, inject

    return inject(invocation, InjectOptions(**options))  # type: ignore[arg-type]
