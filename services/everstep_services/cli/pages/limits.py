"""Limits and switches on the screen."""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, aligned, cell, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import print_answer, print_report, say

COLUMNS = ("section", "limit", "source", "why")


def print_limits(invocation: Invocation, api: Api, job: str) -> None:
    """The limits of a job, and the rule behind them."""
    answer = api.get(f"jobs/{quoted(job)}/limits")
    print_answer(invocation, "limit", answer, answer["limits"], _limit, COLUMNS)
    for line in _said(answer):
        say(line)


def _limit(limit: Record) -> Record:
    return {**limit, "limit": span(limit["limit_s"])}


def print_control(invocation: Invocation, api: Api, job: str | None = None) -> None:
    """Every switch that was set; of slow ranks also what holds where nothing was."""
    answer = api.get("control")
    in_force, note = _in_force(api, job)
    lines = chain(control_page(answer), in_force_page(in_force, job))
    print_report(invocation, "control", {**answer, "straggler": in_force}, lines)
    if note:
        say(note)


def _in_force(api: Api, job: str | None) -> tuple[list[Record], str]:
    """The switches of slow ranks, and why they are not known."""
    try:
        answer = api.get("control/straggler", {"job": job} if job else None)
    except CliError as error:
        if error.code != Exit.UNREACHABLE:
            raise
        return [], f"switches of slow ranks: {error}"
    return list(answer["switches"]), ""


_SOURCES = {
    "control": "set for all jobs",
    "control of the job": "set for this job",
    "brake": "the brake is on",
}


def in_force_page(switches: Sequence[Record], job: str | None) -> Iterator[str]:
    """The value of each switch of slow ranks that is in force, and its origin."""
    if switches:
        yield f"slow ranks, {f'job {cell(job)}' if job else 'where a job has nothing of its own'}:"
        yield from aligned([(cell(switch["name"]), _with_source(switch)) for switch in switches])


def _with_source(switch: Record) -> str:
    source = _SOURCES.get(switch["source"], cell(switch["source"]))
    return f"{cell(switch['value'])}  ({source})"


def control_page(answer: Record) -> Iterator[str]:
    """The lines about switches."""
    for control in (answer["cluster"], *answer["jobs"]):
        about = "all jobs" if control["job"] is None else cell(control["job"])
        yield f"{about}: {_brake(control)}"
        yield from aligned([(name, text) for name, text in _switches(control) if text])
    if answer["breaker_opened_at"]:
        since = moment(answer["breaker_opened_at"])
        yield f"breaker: open since {since} UTC: health excludes no more nodes by itself"
    if answer["distrusted_checks"]:
        names = ", ".join(map(cell, answer["distrusted_checks"]))
        yield f"checks that count against nobody: {names}"


def _brake(control: Record) -> str:
    if not control["is_braked"]:
        return "no brake"
    by = (
        f" (by {cell(control['braked_by'])}: {cell(control['brake_reason'])})"
        if control["braked_by"]
        else ""
    )
    return f"the brake is on{by}: only what failed is restarted"


def _switches(control: Record) -> Iterator[tuple[str, str]]:
    yield "modes", ", ".join(f"{cell(k)}={cell(v)}" for k, v in control["modes"].items())
    yield "settings", ", ".join(f"{cell(k)}={cell(v)}" for k, v in control["settings"].items())
    for exclusion in control["exclusions"]:
        until = moment(exclusion["until_at"]) if exclusion["until_at"] else "somebody includes it"
        text = f"{cell(exclusion['node'])} until {until}, by {cell(exclusion['by'])}"
        yield "excluded", f"{text}: {cell(exclusion['reason'])}"
    if control["changed_by"]:
        yield "changed", f"by {cell(control['changed_by'])}: {cell(control['reason'])}"


def _said(answer: dict[str, Any]) -> Iterator[str]:
    if answer["rule"]:
        yield f"rule: {cell(answer['rule'])}"
    if answer["note"]:
        at = f" (of {moment(answer['at'])} UTC)" if answer["at"] else ""
        yield f"{cell(answer['note'])}{at}"
