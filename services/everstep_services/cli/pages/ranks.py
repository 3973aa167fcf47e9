"""Ranks on the screen, as they are now."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import click

from everstep.units import size
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, blank_or, counted, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import is_terminal, print_answer, say, say_cut

COLUMNS = ("rank", "node", "state", "step", "section", "since", "limit", "age")
WIDE = (*COLUMNS, "slot", "progress", "collectives", "memory", "device_memory")
_PAGE = 1000


def print_ranks(
    invocation: Invocation, api: Api, job: str, params: dict[str, Any], most: int
) -> None:
    """The ranks that were asked for, and on stderr one line about the job."""
    answer = _ranks(api, job, params, most)
    columns = WIDE if invocation.output == "wide" else COLUMNS
    print_answer(invocation, "rank", answer, answer["items"], _shown, columns)
    if answer["next"] is not None:
        say_cut(len(answer["items"]))
    for line in said(answer):
        say(line)


def watch_ranks(
    show: Callable[[], None], every_s: float, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Show them again and again, until Ctrl-C; an API that was there may go away for a while."""
    is_first = True
    while True:
        if is_terminal():
            click.clear()
        try:
            show()
        except CliError as error:
            if error.code is not Exit.UNREACHABLE or is_first:
                raise
            say(f"everstep: {error}")
        is_first = False
        sleep(every_s)


def said(answer: Record) -> Iterator[str]:
    """Remarks that a person needs to read the list."""
    if answer["states"]:
        states = ", ".join(f"{count} {state}" for state, count in sorted(answer["states"].items()))
        yield f"round {answer['round']}: {states}"
    if answer["note"]:
        yield f"{'stale: ' if answer['is_stale'] else ''}{answer['note']}"
    if answer["next"]:
        yield f"only the first {counted(len(answer['items']), 'rank')}: see --limit"


def _ranks(api: Api, job: str, params: dict[str, Any], most: int) -> dict[str, Any]:
    """One answer of as many pages as are needed."""
    path = f"jobs/{quoted(job)}/ranks"
    answer: dict[str, Any] = api.get(path, {**params, "limit": min(most, _PAGE)})
    while answer["next"] and (left := most - len(answer["items"])):
        more = {**params, "limit": min(left, _PAGE), "cursor": answer["next"]}
        page = api.get(path, more)
        answer = {**page, "items": [*answer["items"], *page["items"]]}
    return answer


def _shown(rank: Record) -> dict[str, Any]:
    is_inside = rank["section"] is not None
    named = f" for {rank['limit_name']}" if rank["limit_name"] else ""
    limit = "" if rank["limit_s"] is None else f"{span(rank['limit_s'])} ({rank['limit_source']})"
    limit += named if limit else ""
    return {
        **rank,
        "since": span(rank["section_age_s"] if is_inside else rank["progress_age_s"]),
        "limit": limit,
        "age": span(rank["heard_age_s"]) + (" stale" if rank["is_stale"] else ""),
        "progress": span(rank["progress_age_s"]),
        "memory": blank_or(size, rank["resident_bytes"]),
        "device_memory": blank_or(size, rank["device_bytes"]),
    }
