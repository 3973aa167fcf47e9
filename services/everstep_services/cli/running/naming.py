"""How a job, its nodes and its allocation are called."""

from pathlib import Path

from everstep.ids import BadNameError, checked_name, new_id
from everstep_services.agent.run_plan import Scheduler
from everstep_services.cli.running import safe_names, surroundings
from everstep_services.cli.running.arguments import Given, UsageError


def labels_of(given: Given) -> dict[str, str]:
    """What --label says."""
    labels: dict[str, str] = {}
    for text in given.repeated.get("label", ()):
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--label {text!r}: write KEY=VALUE, for instance team=vision")
        labels[key.strip()] = value.strip()
    return labels


def job_of(given: Given, scheduler: Scheduler, nodes: int) -> str:
    """The job's id: as given, else torchrun's run id, else the scheduler's; at last a new one."""
    if given.text("job"):
        return named("job", given.text("job"), "--job")
    run_id = given.text("rdzv_id")
    if run_id and run_id != "none":
        job = safe_names.safe_name(run_id, "job")
        was = "" if job == run_id else f" ({run_id!r} holds what no id may)"
        given.notes.append(f"the job is called {job}, by {given.origins['rdzv_id']}{was}")
        return job
    if scheduler.job:
        job = safe_names.safe_name(f"{scheduler.name}-{scheduler.job}", "job")
        given.notes.append(f"the job is called {job}; --job NAME gives it another id")
        return job
    if nodes > 1:
        raise UsageError(
            f"{nodes} nodes need an id for the job that they share: give the same --job ID on each"
        )
    stem = safe_names.safe_name(Path(given.script or "").stem, "job")[:40]
    return f"{stem}-{new_id()[-6:]}"


def named(what: str, name: str, option: str) -> str:
    """The name itself, when it may name such a thing."""
    try:
        return checked_name(what, name)
    except BadNameError as error:
        raise UsageError(f"{option}: {error}") from error


def allocation_of(given: Given, scheduler: Scheduler) -> str:
    """The id of this start: as given, else as the scheduler says, else a new one."""
    chosen = given.text("allocation")
    if chosen:
        return named("allocation", chosen, "--allocation")
    return surroundings.allocation_id(scheduler)
