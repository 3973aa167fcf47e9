"""Write batch scripts for Slurm, and do what they need."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, NumberRange, with_common_options
from everstep_services.cli.output import say

_RETRIES = 2


@click.group()
def command() -> None:
    """Write batch scripts for Slurm, and do what they need."""


@command.command(context_settings={"allow_interspersed_args": False})
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- [RUN OPTIONS] SCRIPT...")
@click.option("--job", required=True, metavar="ID", help="The job's id, also after a requeue.")
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
@click.option("--leave-drained", is_flag=True, help="A drained node leaves although none can "
              "take its place.")  # fmt: skip
@click.option("--sbatch", "directives", multiple=True, metavar="OPTION",
              help="Another option of sbatch, as in --sbatch=--partition=gpu.")  # fmt: skip
@click.option("--setup", multiple=True, metavar="LINE",
              help="A line of shell that comes first; may be given several times.")  # fmt: skip
@click.option("--program", default="everstep", metavar="PATH",
              help="How the nodes call everstep (everstep).")  # fmt: skip
@click.option("--write", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
              help="The script's file; by default it is printed.")  # fmt: skip
@with_common_options
def sbatch(  # noqa: PLR0913  what differs between scripts
    words: tuple[str, ...],
    job: str,
    folder: Path | None,
    time: str,
    signal_s: int,
    retries: int,
    chain: int | None,
    control_plane: str,
    leave_drained: bool,
    directives: tuple[str, ...],
    setup: tuple[str, ...],
    program: str,
    write: Path | None,
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
        time=time,
        signal_s=signal_s,
        retries=retries,
        chain=chain or 0,
        control_plane="inside" if control_plane == "inside" else "outside",
        leaves_when_drained=leave_drained,
        directives=directives,
        setup=setup,
        program=program,
    )
    given = scan(words, {})
    text = batch_script(request, given)
    for note in given.notes:
        say(f"everstep: {note}")
    Path(request.folder).mkdir(parents=True, exist_ok=True)  # sbatch makes no folder for its output
    if write is None:
        click.echo(text, nl=False)
        return
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
@click.pass_obj
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
@with_common_options
@click.pass_obj
def watch(invocation: Invocation, *, every_s: float) -> None:
    """Have the agents of drained nodes save and leave, until the batch script ends."""
    from everstep_services.cli.slurm.controller import SlurmController
    from everstep_services.cli.slurm.script_steps import SlurmJob, watch_drains

    slurm = SlurmController(away_s=every_s, say=_say)
    watch_drains(SlurmJob.of(invocation.environ), every_s, slurm, _say)


def _say(text: str) -> None:
    say(f"everstep slurm: {text}")
