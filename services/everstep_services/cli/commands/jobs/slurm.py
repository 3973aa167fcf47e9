"""Write batch scripts for Slurm, and do what they need."""

from pathlib import Path
from typing import Any, Literal

import click

from everstep_services.cli.invocation import NAME, Invocation, NumberRange, with_common_options
from everstep_services.cli.output import say, usable

_RETRIES = 2


class NodeProgram(click.Command):
    """A command that Slurm runs on nodes: a typing error in slurm.conf drains no node."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Exit with 0 for arguments that cannot be read, and report them."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            from everstep_services.cli.slurm.node_programs import FIT, report_unchecked

            report_unchecked(str(self.name), " ".join(error.format_message().split()))
            ctx.exit(FIT)


@click.group()
def command() -> None:
    """Write batch scripts for Slurm, and do what they need."""


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- [RUN OPTIONS] SCRIPT...")
@click.option(
    "--job", type=NAME, required=True, metavar="ID", help="The job's id, also after a requeue."
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="For output, counters and notices; all nodes must share it (a folder of the job's name).",
)
@click.option("--time", metavar="LIMIT", default="", help="The time limit, as for sbatch.")
@click.option(
    "--signal",
    "signal_s",
    type=click.IntRange(0, 65535),
    metavar="SECONDS",
    default=600,
    help="How long before its end the allocation is warned, so that ranks save (600); 0 for never.",
)
@click.option(
    "--retries",
    type=click.IntRange(0, 1000),
    metavar="N",
    default=_RETRIES,
    help=f"After how many failed allocations in a row another one follows ({_RETRIES}).",
)
@click.option(
    "--chain",
    type=click.IntRange(1, 10_000),
    metavar="N",
    help="An array of N allocations, one after the other, instead of requeueing one job.",
)
@click.option(
    "--control-plane",
    type=click.Choice(("outside", "inside")),
    default="outside",
    help="Where bus and services run: elsewhere (the default), or on the first node.",
)
@click.option("--leave-drained", "leaves_when_drained", is_flag=True,
              help="A drained node leaves even if no spare can take its place.")  # fmt: skip
@click.option("--drain-excluded", "drains_excluded", default="off",
              type=click.Choice(("off", "observe", "enforce")),
              help="Drain nodes in Slurm that Everstep has excluded, or only report it (off)."
              )  # fmt: skip
@click.option("--sbatch", "directives", multiple=True, metavar="OPTION",
              help="Another option of sbatch, as in --sbatch=--partition=gpu.")  # fmt: skip
@click.option("--setup", multiple=True, metavar="LINE",
              help="A line of shell that comes first; may be given several times.")  # fmt: skip
@click.option("--program", default="everstep", metavar="PATH",
              help="How the nodes call everstep (everstep).")  # fmt: skip
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The script's file; by default it is printed.")  # fmt: skip
@with_common_options
def sbatch(
    _invocation: Invocation,
    /,
    *,
    words: tuple[str, ...],
    job: str,
    folder: Path | None,
    chain: int | None,
    write: Path | None,
    **asked: Any,
) -> None:
    """Write a batch script that runs `everstep run` on each node, and requeues itself.

    The number of nodes is that of --nnodes and --spares:

    everstep slurm sbatch --job llama --time 04:00:00 -- --nnodes 4 --spares 1
    --nproc-per-node 8 train.py | sbatch
    """
    from everstep_services.cli.run.arguments import scan
    from everstep_services.cli.slurm.batch_script import BatchRequest, batch_script, checked_job

    request = BatchRequest(
        words=words,
        job=checked_job(job),
        folder=str((folder or Path(job)).expanduser().absolute()),
        chain=chain or 0,
        **asked,
    )
    given = scan(words, {})
    text = batch_script(request, given)
    for note in given.notes:
        say(f"everstep: {note}")
    with usable(f"--folder {request.folder}"):  # sbatch makes no folder for its output
        Path(request.folder).mkdir(parents=True, exist_ok=True)
    if write is None:
        click.echo(text, nl=False)
        return
    with usable(f"--write {write}"):
        write.write_text(text)
        write.chmod(0o755)
    say(f"submit it with: sbatch {write}")


@command.command()
@click.argument("code", type=click.IntRange(0, 255))
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    metavar="DIR",
    help="Where allocations are counted.",
)
@click.option("--retries", type=click.IntRange(0, 1000), metavar="N", default=_RETRIES,
              help=f"How many failed allocations in a row are followed by another one ({_RETRIES})."
              )  # fmt: skip
@click.option("--requeue/--chain", "requeues", default=True,
              help="Requeue this job, or cancel the rest of its array where nothing is left to do."
              )  # fmt: skip
@click.option("--away", "away_s", type=NumberRange(min=0), metavar="SECONDS", default=600.0,
              help="How long Slurm's controller may be away (600).")  # fmt: skip
@with_common_options
def finish(
    invocation: Invocation, *, code: int, folder: Path, retries: int, requeues: bool, away_s: float
) -> int:
    """End an allocation in a batch script: count it, requeue the job or not, exit with its code.

    CODE is the exit code of srun. 0, 2, 93 and 130 end the job. After 91 it continues. Every other
    code is a failure; after more than --retries failures in a row the job ends.
    """
    from everstep_services.cli.slurm.allocations import AllocationLedger
    from everstep_services.cli.slurm.controller import SlurmController
    from everstep_services.cli.slurm.script_steps import SlurmJob
    from everstep_services.cli.slurm.script_steps import finish as finish_allocation

    return finish_allocation(
        SlurmJob.of(invocation.environ),
        code,
        AllocationLedger(folder),
        retries,
        in_chain=not requeues,
        slurm=SlurmController(away_s=away_s, say=_say),
        say=_say,
    )


@command.command()
@click.option("--every", "every_s", type=NumberRange(min=0.1), metavar="SECONDS", default=60.0,
              help="How often to ask Slurm's controller (60).")  # fmt: skip
@click.option("--drain-excluded", type=click.Choice(("off", "observe", "enforce")), default="off",
              help="Drain nodes that Everstep has excluded, or only report it (off).")  # fmt: skip
@with_common_options
def watch(
    invocation: Invocation, *, every_s: float, drain_excluded: Literal["off", "observe", "enforce"]
) -> None:
    """Have the agents of drained nodes save and leave, until the batch script ends.

    With --drain-excluded also drain the nodes that rendezvous refuses as excluded. This needs an
    operator's rights in Slurm.
    """
    from everstep_services.cli.slurm.controller import SlurmController
    from everstep_services.cli.slurm.script_steps import SlurmJob, watch_drains

    job = SlurmJob.of(invocation.environ)
    watch_drains(job, every_s, SlurmController(away_s=0.0), _say, drains=drain_excluded)


_NAMES = click.argument("names", type=NAME, nargs=-1, metavar="[NAME]...")
_WITHIN = click.option("--within", "within_s", type=NumberRange(min=0, min_open=True),
                       metavar="SECONDS", default=20.0,
                       help="How long all checks may take (20).")  # fmt: skip


@command.command(cls=NodeProgram)
@_NAMES
@_WITHIN
@with_common_options
def prolog(invocation: Invocation, *, names: tuple[str, ...], within_s: float) -> int:
    """Check this node before a job: for Prolog in slurm.conf.

    NAMEs are checks, as for `everstep check`. Exits with 1, so that Slurm drains the node and
    requeues the job, only if a check has failed; a check without a result, wrong settings, wrong
    options and wrong names drain no node. Problems go to stderr and to the system's log.
    """
    from everstep_services.cli.slurm.node_programs import before_job

    return before_job(invocation, names, within_s)


@command.command(cls=NodeProgram)
@_NAMES
@_WITHIN
@with_common_options
def epilog(invocation: Invocation, *, names: tuple[str, ...], within_s: float) -> int:
    """Clean up and check this node after a job: for Epilog in slurm.conf.

    Kills the ranks that dead agents have left, then checks the node as `everstep slurm prolog`
    does.
    """
    from everstep_services.cli.slurm.node_programs import after_job

    return after_job(invocation, names, within_s)


def _say(text: str) -> None:
    say(f"everstep slurm: {text}")
