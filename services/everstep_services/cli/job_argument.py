"""The job that a command is about, where its user names none."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import NAME, Invocation

if TYPE_CHECKING:
    from everstep_services.cli.api.client import Api

F = TypeVar("F", bound=Callable[..., Any])
_NAMED_MOST = 5


def newest_job(api: "Api") -> str:
    """The job that began last."""
    jobs = api.get("jobs", {"limit": 1})["items"]
    if not jobs:
        raise CliError(f"no job is on record yet: {FIRST_JOB}", Exit.NOT_FOUND)
    return str(jobs[0]["job"])


FIRST_JOB = (
    "`everstep run --nproc-per-node 4 train.py` starts one, and `everstep demo` shows what happens "
    "when ranks die"
)


def with_newest_job(command: F) -> F:
    """Give a command that only reads the argument JOB; without it, the newest job is meant."""
    return click.argument("job", type=NAME, required=False, callback=the_newest)(command)


def with_job_at_work(command: F) -> F:
    """Give a command that acts the argument JOB; without it, the only job at work is meant."""
    return click.argument("job", type=NAME, required=False, callback=job_at_work)(command)


def the_newest(ctx: click.Context, _: click.Parameter, job: str | None) -> str | None:
    """The job that is named, or else the newest."""
    from everstep_services.cli.output import say

    if job is not None or ctx.resilient_parsing:
        return job
    with ctx.ensure_object(Invocation).open_record() as api:
        job = newest_job(api)
    say(f"job {job}, the newest")
    return job


def job_at_work(ctx: click.Context, _: click.Parameter, job: str | None) -> str | None:
    """The job that is named, or else the only one at work."""
    from everstep.job_states import AT_WORK
    from everstep_services.cli.output import say

    if job is not None or ctx.resilient_parsing:
        return job
    with ctx.ensure_object(Invocation).open_api() as api:
        jobs = api.get("jobs", {"state": list(AT_WORK), "limit": _NAMED_MOST})["items"]
    names = [str(job["job"]) for job in jobs]
    if len(names) != 1:
        which = f"at work are {', '.join(names)}" if names else "none is at work"
        raise click.UsageError(f"name the job: {which}", ctx)
    say(f"job {names[0]}, the only one at work")
    return names[0]
