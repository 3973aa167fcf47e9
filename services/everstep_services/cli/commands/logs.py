"""Print what the ranks of a job wrote."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.argument("job")
@click.option("--round", "number", type=click.IntRange(min=0), help="Of this round (the newest).")
@click.option(
    "--rank",
    "ranks",
    type=click.IntRange(min=0),
    multiple=True,
    help="Only of this rank; may be given several times.",
)
@click.option("--node", help="Only of ranks on this node.")
@click.option("--stdout", "stream", flag_value="stdout", help="Only what went to stdout.")
@click.option("--stderr", "stream", flag_value="stderr", help="Only what went to stderr.")
@click.option(
    "-n",
    "--lines",
    "last",
    type=click.IntRange(min=1),
    help="Only so many lines of each file, its last ones.",
)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written, on this node.")
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Where the output of ranks is kept; by default as `everstep run` has it.",
)
@with_api_options
@click.pass_obj
def command(  # noqa: PLR0913  each is an option
    invocation: Invocation,
    *,
    job: str,
    number: int | None,
    ranks: tuple[int, ...],
    node: str | None,
    stream: str | None,
    last: int | None,
    follow: bool,
    log_dir: Path | None,
) -> None:
    """Print what the ranks of a job wrote, each line with its node and rank before it.

    On a node that ran the round, all of it, from its files. Elsewhere the ends of the logs of
    those ranks that failed, from the record: also when their node is gone.
    """
    from everstep.ids import checked_name
    from everstep_services.cli.rank_logs import STREAMS, Wanted
    from everstep_services.cli.rank_logs_source import show

    if follow and last is not None:
        raise click.UsageError("-f shows all and goes on: it takes no --lines")
    if invocation.output == "name":
        raise click.UsageError("lines have no names: use -o json or jsonl")
    wanted = Wanted(
        checked_name("job", job), number, ranks, node, (stream,) if stream else STREAMS, last
    )
    show(invocation, wanted, log_dir, is_live=follow)
