"""List checkpoints, read them back, pin, clean up or pull them."""

from collections.abc import Callable
from pathlib import Path

import click

from everstep.ids import BadNameError, checked_name
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.job_argument import job_at_work, the_newest
from everstep_services.cli.operator_requests import (
    NO_REASON,
    CheckpointRequest,
    ScanRequest,
    fulfil,
    with_reason,
)
from everstep_services.cli.output import say

_STEP = click.IntRange(min=0)
_TIER = click.option(
    "--tier",
    type=click.Choice(["global", "memory", "peer"]),
    help="Only in this tier; memory and peer need a job, not a folder.",
)


@click.group()
def command() -> None:
    """List checkpoints, read them back, pin, clean up or pull them.

    WHERE is a job, about which the catalog is asked, or a folder or URL of checkpoints, which needs
    no service and has a slash in it, as ./ckpt or s3://bucket/llama. Without WHERE,
    commands that need no STEP are about the newest job, and `gc` and `scan` about the one at work.
    """


def _where(context: click.Context, parameter: click.Parameter, where: str | None) -> str | None:
    if where is None:
        otherwise = job_at_work if context.info_name == "gc" else the_newest
        return otherwise(context, parameter, None)
    if is_place(where):
        return where
    if Path(where).is_dir():
        say(f"{where} is taken for a job; the folder of that name here is ./{where}")
    try:
        return checked_name("job", where)
    except BadNameError as error:
        raise click.UsageError(f"{error}; a folder or URL has a slash in it: ./ckpt") from error


def _job(remedy: str, otherwise: Callable[..., str | None]) -> Callable[..., str | None]:
    """A job and no place; `remedy` is the command for a place, `otherwise` finds a job."""

    def checked(context: click.Context, parameter: click.Parameter, job: str | None) -> str | None:
        if job is not None and is_place(job):
            raise click.UsageError(
                f"JOB is the name of a job, and {job} is a folder or URL: see everstep jobs, or "
                f"everstep ckpt {remedy.format(place=job)}"
            )
        name = otherwise(context, parameter, job)
        return None if name is None else checked_name("job", name)

    return checked


def _about_a_step(callback: Callable[..., None]) -> click.Command:
    """A command about the checkpoint of a step, with a reason for the record."""
    taken = click.argument("step", type=_STEP)(with_reason(callback))
    return command.command()(click.argument("where", type=NAME, callback=_where)(taken))


@command.command("ls")
@click.argument("where", type=NAME, required=False, callback=_where)
@_TIER
@click.option(
    "-n", "--limit", type=click.IntRange(1, 1000), default=100, help="At most N checkpoints (100)."
)
@with_api_options
def ls(invocation: Invocation, *, where: str, tier: str | None, limit: int) -> None:
    """List checkpoints, the newest first, with their tier, state and size."""
    if is_place(where):
        _of_files_only(tier)
        from everstep_services.cli.pages.checkpoints.files import print_shelf

        print_shelf(invocation, where, limit)
        return
    from everstep_services.cli.pages.checkpoints.catalog import print_checkpoints

    with invocation.open_record() as api:
        print_checkpoints(invocation, api, where, tier, limit)


@command.command()
@click.argument("where", type=NAME, callback=_where)
@click.argument("step", type=_STEP)
@_TIER
@with_api_options
def show(invocation: Invocation, *, where: str, step: int, tier: str | None) -> int:
    """Show one checkpoint: its files, or who has it in memory.

    Exit codes: 0 its files are there, 1 one of a folder or URL is missing, has another size, or
    cannot be used.
    """
    if is_place(where):
        _of_files_only(tier)
        from everstep_services.cli.pages.checkpoints.files import print_shelved

        return print_shelved(invocation, where, step)
    from everstep_services.cli.pages.checkpoints.catalog import print_checkpoint

    with invocation.open_record() as api:
        print_checkpoint(invocation, api, where, step, tier)
    return Exit.OK


@command.command()
@click.argument("where", type=NAME, callback=_where)
@click.argument("step", type=_STEP, required=False)
@with_reason
def verify(invocation: Invocation, *, where: str, step: int | None, reason: str) -> int:
    """Read every byte again and compare it with what was saved.

    With a folder or URL this command reads all checkpoints in it, or that of one step; WHERE may
    also be the folder of one checkpoint. With a job the catalog reads them, and quarantines those
    that are not good.

    DOUBTFUL is a checkpoint whose bytes are good, but whose state an earlier release may have
    restored incompletely before it saved it.

    Exit codes: 0 all are good, 1 one is not.
    """
    if is_place(where):
        _without_record(reason)
        from everstep_services.cli.pages.checkpoints.files import verify_shelf

        return verify_shelf(invocation, where, step)
    if step is None:
        raise click.UsageError("name the STEP to read back, after the job")
    fulfil(invocation, CheckpointRequest.of("verify", where, step, reason))
    return Exit.OK


@command.command()
@click.argument("job", type=NAME, required=False, callback=_job("ls {place}", the_newest))
@click.option("--step", type=_STEP, help="Only this step; by default the newest.")
@with_api_options
def locate(invocation: Invocation, *, job: str, step: int | None) -> None:
    """Show what a job's next round would restore, and from where."""
    from everstep_services.cli.pages.checkpoints.catalog import print_located

    with invocation.open_record() as api:
        print_located(invocation, api, job, step)


@_about_a_step
def pin(invocation: Invocation, *, where: str, step: int, reason: str) -> None:
    """Keep a checkpoint, whatever retention says."""
    _do(invocation, "pin", where, step, reason)


@_about_a_step
def unpin(invocation: Invocation, *, where: str, step: int, reason: str) -> None:
    """Let retention delete a checkpoint again."""
    _do(invocation, "unpin", where, step, reason)


@_about_a_step
def quarantine(invocation: Invocation, *, where: str, step: int, reason: str) -> None:
    """Forbid that a checkpoint is restored, and keep it."""
    _do(invocation, "quarantine", where, step, reason)


@_about_a_step
@click.option(
    "--tier",
    type=click.Choice(["global", "memory"]),
    default="global",
    help="memory: the states of this step on all nodes of the job, their own and copies.",
)
def release(invocation: Invocation, *, where: str, step: int, tier: str, reason: str) -> None:
    """Let a quarantined checkpoint be restored again."""
    if tier != "global" and is_place(where):
        raise click.UsageError("what is in the memory of nodes is released by JOB")
    _do(invocation, "release", where, step, reason, tier)


@command.command()
@click.argument(
    "job", type=NAME, required=False, callback=_job("scan JOB --root {place}", job_at_work)
)
@click.option(
    "--root", default="", metavar="PLACE", help="A folder or URL, as the catalog sees it."
)
@with_reason
def scan(invocation: Invocation, *, job: str, root: str, reason: str) -> None:
    """Have the catalog compare its index with the files, or rebuild it from them."""
    fulfil(invocation, ScanRequest("scan", reason, job, details={"root": root}))


@command.command()
@click.argument("where", type=NAME, required=False, callback=_where)
@click.option("--keep-last", type=click.IntRange(1), metavar="N", help="Keep the N newest.")
@click.option(
    "--keep-every",
    "keep_every_steps",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Also keep older checkpoints whose step is a multiple of this.",
)
@click.option(
    "--delete", "wants_it", is_flag=True, help="Delete; otherwise only list what would be deleted."
)
@with_reason
def gc(
    invocation: Invocation,
    /,
    *,
    where: str,
    keep_last: int | None,
    keep_every_steps: int | None,
    wants_it: bool,
    reason: str,
) -> None:
    """List the checkpoints that retention does not keep; with --delete, delete them.

    With a job, options that are not given are those of the catalog. With a folder or URL, the
    newest checkpoint is read back first. The last good checkpoint stays, and so do pinned and
    quarantined ones. Files of failed saves are deleted, too, once they have not changed for a day.
    """
    if is_place(where):
        _without_record(reason)
        from everstep_services.cli.pages.checkpoints.files import collect_shelf

        if keep_last is None:
            raise click.UsageError("a folder or URL needs --keep-last N: how many checkpoints stay")
        collect_shelf(invocation, where, (keep_last, keep_every_steps or 0), wants_it=wants_it)
        return
    from everstep_services.cli.pages.checkpoints.catalog import print_collected

    asked = {
        "keep_last": keep_last,
        "keep_every_steps": keep_every_steps,
        "is_dry_run": not wants_it,
        "reason": reason,
    }
    with invocation.open_api() as api:
        print_collected(invocation, api, where, asked)


@command.command()
@click.argument("where", type=NAME, callback=_where)
@click.argument("step", type=_STEP)
@click.argument("to", type=click.Path(file_okay=False))
@with_api_options
def pull(invocation: Invocation, *, where: str, step: int, to: str) -> None:
    """Copy a checkpoint into a folder of this machine, comparing every byte.

    The copy becomes visible once it is complete and verified. For a job, the catalog knows the
    place.
    """
    from everstep_services.cli.pages.checkpoints.files import pull_to

    if not to or "://" in to:
        problem = f"{to} is a URL" if to else "it is empty"
        raise click.UsageError(f"TO is a folder of this machine, and {problem}")
    place = where if is_place(where) else _path(invocation, where, step)
    pull_to(invocation, place, step, Path(to))


@command.command("export")
@click.argument("where", type=NAME, callback=_where)
@click.argument("step", type=_STEP)
@click.argument("to", type=click.Path())
@click.option("--prefix", default="model.", help="Export keys that begin so, without it (model.).")
@click.option(
    "--shard-mb",
    type=click.IntRange(1),
    default=5000,
    metavar="MB",
    help="The most megabytes in one file of a folder (5000).",
)
@click.option(
    "--like",
    type=click.Path(exists=True, file_okay=False),
    help="A folder whose config.json, tokenizer and other files are copied as well.",
)
@with_api_options
def export_(
    invocation: Invocation, /, *, where: str, step: int, to: str, shard_mb: int, **form: str | None
) -> None:
    """Write the tensors of a checkpoint as safetensors, verifying every byte that is read.

    TO is a file that ends with .safetensors, or a folder, which from_pretrained reads if --like
    gives it a config.json. It must not exist. Needs torch and safetensors.
    """
    from everstep_services.cli.pages.checkpoints.files import export_to

    place = where if is_place(where) else _path(invocation, where, step)
    export_to(invocation, place, step, to, {**form, "most_bytes": shard_mb * 10**6})


@command.command()
@click.argument("source", type=click.Path(exists=True, file_okay=False))
@click.argument("root", type=click.Path(file_okay=False))
@click.option("--step", type=_STEP, required=True, help="The step after which it was saved.")
@click.option(
    "--job", type=NAME, default="local", help="The job that the checkpoint is for (local)."
)
@with_api_options
def adopt(invocation: Invocation, *, source: str, root: str, step: int, job: str) -> None:
    """Take over a checkpoint that torch.distributed.checkpoint has written.

    SOURCE is its folder, ROOT the folder that a Checkpointer saves into; both are on this machine.
    The files are hashed and linked; SOURCE stays as it is.
    """
    from everstep_services.cli.pages.checkpoints.files import adopt_into

    adopt_into(invocation, source, root, step, checked_name("job", job))


def _of_files_only(tier: str | None) -> None:
    if tier not in (None, "global"):
        raise click.UsageError(
            f"a folder or URL has nothing of the {tier} tier: name a JOB, or leave --tier out"
        )


def _without_record(reason: str) -> None:
    if reason != NO_REASON:
        raise click.UsageError(
            "requests about a folder or URL are not recorded: name a JOB, or leave --reason out"
        )


def is_place(where: str) -> bool:
    """It is a folder or URL, and no job: no job has a slash in its name."""
    return "/" in where or where in {".", ".."}


def _do(
    invocation: Invocation, action: str, where: str, step: int, reason: str, tier: str = "global"
) -> None:
    if is_place(where):
        from everstep_services.cli.pages.checkpoints.files import mark_shelved

        mark_shelved(invocation, where, step, action, reason)
        return
    fulfil(invocation, CheckpointRequest.of(action, where, step, reason, tier))


def _path(invocation: Invocation, job: str, step: int) -> str:
    from everstep_services.cli.pages.checkpoints.catalog import found_in

    with invocation.open_record() as api:
        path = found_in(api, job, step, "global")["path"]
    if not path:
        raise CliError(f"step {step} of {job} is in no file: wait for its save", Exit.NOT_FOUND)
    return str(path).rpartition("/")[0]
