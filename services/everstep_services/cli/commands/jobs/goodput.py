"""Show what a job's time went to, or the time of all jobs."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import click

from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.cells import Record, aligned, bar, cell, counted, moment, span
from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.output import echo, print_json, schema
from everstep_services.cli.times import MomentParameter


@click.command()
@click.argument("job", type=NAME, required=False)
@click.option(
    "--since",
    type=MomentParameter(),
    metavar="MOMENT",
    help="Only since then: 24h for 24 hours ago, or a time.",
)
@click.option(
    "--until",
    type=MomentParameter(),
    metavar="MOMENT",
    help="Until this moment (now, or the end of JOB).",
)
@with_api_options
def command(
    invocation: Invocation, *, job: str | None, since: datetime | None, until: datetime | None
) -> None:
    """Show what each second of a job's allocations was spent on.

    Every second is in exactly one class, and all classes sum to the wall clock. Without a job, the
    last 24 hours of all jobs are shown, with the jobs that lost the most time.
    """
    window = {"since": since, "until": until}
    with invocation.open_record() as api:
        if job is None:
            print_fleet_goodput(invocation, api, window)
        else:
            print_goodput(invocation, api, job, window)


_NAMES = {
    "productive": "productive",
    "start_up": "start-up",
    "rendezvous": "rendezvous",
    "restore": "restore",
    "heal": "heal",
    "checkpoint_stall": "checkpoint stall",
    "stall": "stall",
    "lost_steps": "lost steps",
    "straggler_tax": "straggler tax",
    "idle": "idle",
    "unknown": "unknown",
}
"""The classes, in the order in which they are shown."""


def print_goodput(
    invocation: Invocation, api: Api, job: str, window: Mapping[str, datetime | None]
) -> None:
    """One job: seconds by class."""
    shown = api.get(f"{job_path(job)}/goodput", _given(window))
    if invocation.output in {"json", "jsonl", "name"}:
        print_json({"schema": schema("goodput"), **shown})
        return
    for line in goodput_page(f"job {cell(job)}", shown):
        echo(line)
    about = api.get(job_path(job))
    is_unknown = about["lost_steps"] is None and (about["rounds"] or 0) > 1
    if shown["goodput_ratio"] is not None and is_unknown:
        echo("")
        echo("How many steps were made again is not known, because the script does not number its")
        echo("steps: repeated steps count as productive.")
    if about["lost_steps"]:
        echo("")
        echo(f"{counted(about['lost_steps'], 'step')} made again: a step that is made again is")
        echo("productive the last time only; the time before counts as lost steps.")


def print_fleet_goodput(
    invocation: Invocation, api: Api, window: Mapping[str, datetime | None]
) -> None:
    """All jobs: seconds by class, and the jobs that lost the most."""
    shown = api.get("goodput", _given(window))
    if invocation.output in {"json", "jsonl", "name"}:
        print_json({"schema": schema("fleet_goodput"), **shown})
        return
    count = shown["jobs"]
    for line in goodput_page(f"{count} job{'' if count == 1 else 's'}", shown):
        echo(line)
    worst = [job for job in shown["worst"] if _lost_s(job) > 0]
    if worst:
        echo("")
        echo("The most time was lost by")
        rows = [(job["job"], span(_lost_s(job)), _ratio(job), _most(job)) for job in worst]
        for line in aligned([("JOB", "LOST", "GOODPUT", "MOST OF IT"), *rows]):
            echo(line)


def goodput_page(title: str, shown: Record) -> Iterator[str]:
    """The lines of a window."""
    since = f"since {moment(shown['since'])}, " if shown["since"] else ""
    yield f"{title}: {since}until {moment(shown['until'])}, {span(shown['wall_s'])} allocated"
    if not shown["wall_s"]:
        yield "No allocation lasted in this window."
        return
    yield f"goodput {_ratio(shown)}"
    yield ""
    seconds = shown["seconds"]
    yield from aligned(
        (_NAMES.get(name, name), span(lasted_s), f"{lasted_s / shown['wall_s']:.1%}",
         bar(lasted_s, shown["wall_s"]))
        for name in (*_NAMES, *(set(seconds) - set(_NAMES)))
        if (lasted_s := seconds.get(name, 0.0)) > 0
    )  # fmt: skip


def _ratio(shown: Record) -> str:
    ratio = shown["goodput_ratio"]
    return "not known: no step was seen" if ratio is None else f"{ratio:.1%}"


def _given(window: Mapping[str, datetime | None]) -> dict[str, Any]:
    return {name: value.isoformat() for name, value in window.items() if value is not None}


def _lost_s(shown: Record) -> float:
    return float(shown["wall_s"] - shown["seconds"].get("productive", 0.0))


def _most(shown: Record) -> str:
    lost = {name: value for name, value in shown["seconds"].items() if name != "productive"}
    name, lasted_s = max(lost.items(), key=lambda item: item[1])
    return f"{_NAMES.get(name, name)} ({span(lasted_s)})"
