"""Limits and switches on the screen."""

from collections.abc import Iterator, Sequence
from typing import Any

from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, aligned, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import (
    cell,
    echo,
    print_json,
    print_line,
    print_records,
    say,
    schema,
)

COLUMNS = ("section", "limit", "source", "why")


def print_limits(invocation: Invocation, api: Api, job: str) -> None:
    """The limits of a job, and the rule behind them."""
    found = api.get(f"jobs/{quoted(job)}/limits")
    match invocation.output:
        case "json":
            print_json({"schema": schema("limit"), **found})
        case "jsonl":
            for one in found["limits"]:
                print_line(one)
        case _:
            rows = ({**one, "limit": span(one["limit_s"])} for one in found["limits"])
            print_records(invocation, "limit", rows, COLUMNS)
    for line in _said(found):
        say(line)


def print_control(invocation: Invocation, api: Api, job: str | None = None) -> None:
    """Every switch that was set; of slow ranks also what holds where nothing was."""
    found = api.get("control")
    in_force, note = _in_force(api, job)
    if invocation.output in {"json", "jsonl", "name"}:
        print_json({"schema": schema("control"), **found, "straggler": in_force})
    else:
        for line in control_page(found):
            echo(line)
        for line in in_force_page(in_force, job):
            echo(line)
    if note:
        say(note)


def _in_force(api: Api, job: str | None) -> tuple[list[Record], str]:
    """The switches of slow ranks, and why they are not known."""
    try:
        found = api.get("control/straggler", {"job": job} if job else None)
    except CliError as error:
        if error.code != Exit.UNREACHABLE:
            raise
        return [], f"switches of slow ranks: {error}"
    return list(found["switches"]), ""


_SOURCES = {
    "control": "set for all jobs",
    "control of the job": "set for this job",
    "brake": "the brake is on",
}


def in_force_page(switches: Sequence[Record], job: str | None) -> Iterator[str]:
    """What holds of each switch of slow ranks, and where that is from."""
    if switches:
        yield f"slow ranks, {f'job {cell(job)}' if job else 'where a job has nothing of its own'}:"
        yield from aligned(
            [
                (
                    cell(one["name"]),
                    f"{cell(one['value'])}  ({_SOURCES.get(one['source'], cell(one['source']))})",
                )
                for one in switches
            ]
        )


def control_page(found: Record) -> Iterator[str]:
    """The lines about what is switched."""
    for one in (found["cluster"], *found["jobs"]):
        about = "all jobs" if one["job"] is None else cell(one["job"])
        yield f"{about}: {_brake(one)}"
        yield from aligned([(name, text) for name, text in _switches(one) if text])
    if found["breaker_opened_at"]:
        since = moment(found["breaker_opened_at"])
        yield f"breaker: open since {since} UTC: health excludes no more nodes by itself"
    if found["distrusted_checks"]:
        names = ", ".join(map(cell, found["distrusted_checks"]))
        yield f"checks that count against nobody: {names}"


def _brake(one: Record) -> str:
    if not one["is_braked"]:
        return "no brake"
    by = f" (by {cell(one['braked_by'])}: {cell(one['brake_reason'])})" if one["braked_by"] else ""
    return f"the brake is on{by}: everything only observes"


def _switches(one: Record) -> Iterator[tuple[str, str]]:
    yield "modes", ", ".join(f"{cell(k)}={cell(v)}" for k, v in one["modes"].items())
    yield "settings", ", ".join(f"{cell(k)}={cell(v)}" for k, v in one["settings"].items())
    for exclusion in one["exclusions"]:
        until = moment(exclusion["until_at"]) if exclusion["until_at"] else "somebody includes it"
        said = f"{cell(exclusion['node'])} until {until}, by {cell(exclusion['by'])}"
        yield "excluded", f"{said}: {cell(exclusion['reason'])}"
    if one["changed_by"]:
        yield "changed", f"by {cell(one['changed_by'])}: {cell(one['reason'])}"


def _said(found: dict[str, Any]) -> Iterator[str]:
    if found["rule"]:
        yield f"rule: {cell(found['rule'])}"
    if found["note"]:
        at = f" (of {moment(found['at'])} UTC)" if found["at"] else ""
        yield f"{cell(found['note'])}{at}"
