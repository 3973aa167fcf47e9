"""List facts, or follow them as they happen."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

import click
import msgspec

from everstep_services.cli.api.client import Api, ProblemBody, follow
from everstep_services.cli.cells import aligned, cell
from everstep_services.cli.errors import CliError
from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.output import echo, is_terminal, print_line, print_records, say, say_cut
from everstep_services.cli.times import MomentParameter


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Continue with new facts as they arrive.")
@click.option("--job", type=NAME, help="Only about this job.")
@click.option("--kind", multiple=True, help="Only of this kind; may be given several times.")
@click.option("--node", type=NAME, help="Only about this node.")
@click.option("--source", help="Only from this sender.")
@click.option("--round", "round", type=click.IntRange(min=0), help="Only of this round.")
@click.option(
    "--since",
    type=MomentParameter(),
    metavar="MOMENT",
    help="Only facts that arrived since then: 10m for 10 minutes ago, or a time.",
)
@click.option(
    "--until", type=MomentParameter(), metavar="MOMENT", help="Only those that arrived before."
)
@click.option("-n", "--limit", type=click.IntRange(min=1), help="At most N facts (100).")
@with_api_options
def command(invocation: Invocation, /, *, follow: bool, **asked: Any) -> None:
    """List the newest facts, or those since a moment, the oldest first.

    With -f it prints facts from now on, or since a moment. After a lost connection it continues
    without a gap.
    """
    if follow and (asked["until"] is not None or asked["limit"] is not None):
        raise click.UsageError("-f never ends: leave out --until and --limit")
    if follow:
        with invocation.open_api() as api:
            print_live(invocation, api, wanted(**asked))
    else:
        with invocation.open_record() as api:
            print_past(invocation, api, wanted(**asked))


COLUMNS = ("at", "job", "kind", "round", "node", "source", "details")

_SHOWN_APART = frozenset({"type", "id", "job", "at", "source", "round", "node", "cells"})
_WIDTHS = (24, 12, 18, 5, 10, 12)
"""Of the columns before the last, so that live facts line up."""
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class FactSelection:
    """Which facts, and how many."""

    which: Mapping[str, Any]
    since: datetime | None
    until: datetime | None
    most: int


def wanted(
    *, since: datetime | None, until: datetime | None, limit: int | None, **which: Any
) -> FactSelection:
    """The selection that the options describe."""
    kinds = list(which.pop("kind", ())) or None
    return FactSelection({**which, "kind": kinds}, since, until, limit or 100)


def print_past(invocation: Invocation, api: Api, asked: FactSelection) -> None:
    """The first facts since a moment, or, without one, the newest; the oldest first."""
    facts = _past(api, asked, most=asked.most)
    first = next(facts, None)
    if first is None:
        say("no such facts")
    else:
        facts = chain([first], facts)
    if asked.since is None:
        facts = reversed(list(facts))
    if invocation.output not in {"json", "jsonl"}:
        facts = map(_shown, facts)
    columns = ("id",) if invocation.output == "name" else COLUMNS
    print_records(invocation, "fact", facts, columns)


def print_live(invocation: Invocation, api: Api, asked: FactSelection) -> None:
    """Every fact from now on, or since a moment, for ever, each as soon as it is known."""
    after: int | None = None
    if asked.since is not None:
        # Asked first: what is recorded while the past is read must come in the stream.
        after = int(api.get("status")["last_n"])
        for fact in _past(api, asked, most=None):
            after = max(after, int(fact["n"]))
            _print(invocation, fact)
    for fact in _live(api, {**asked.which, "after": after}):
        _print(invocation, fact)


def _past(api: Api, asked: FactSelection, most: int | None) -> Iterator[dict[str, Any]]:
    times = {
        name: None if moment is None else moment.isoformat()
        for name, moment in (("since", asked.since), ("until", asked.until))
    }
    params = {
        **asked.which,
        "limit": _PAGE if most is None else min(most, _PAGE),
        "order": "desc" if asked.since is None else "asc",
    }
    others = "; --until shows older ones" if asked.since is None else "; --since shows later ones"
    arrivals = {f"received_{name}": moment for name, moment in times.items()}
    when_cut = partial(say_cut, others=others)
    try:
        yield from api.pages("facts", {**params, **arrivals}, most=most, when_cut=when_cut)
    except CliError as error:
        if "query.received_" not in str(error):
            raise
        say("the API is of an older release: --since and --until go by the senders' clocks")
        yield from api.pages("facts", {**params, **times}, most=most, when_cut=when_cut)


def _live(api: Api, params: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for event in follow(api, "facts/stream", params, say=say):
        if event.event == "fact":
            yield msgspec.json.decode(event.data)
        elif event.event == "reset":
            reason = msgspec.json.decode(event.data, type=dict[str, Any]).get("reason")
            say(f"some facts may be missing here: {cell(reason)}")
        elif event.event == "problem":
            raise CliError(msgspec.json.decode(event.data, type=ProblemBody).detail)


def _print(invocation: Invocation, fact: dict[str, Any]) -> None:
    shown = _shown(fact)
    if invocation.output in {"json", "jsonl"}:
        print_line(fact)
    elif invocation.output == "name":
        echo(cell(fact["id"]))
    elif invocation.output == "table" or is_terminal():
        row = [shown[name] for name in COLUMNS]
        echo("\n".join(aligned([row], indent=0, widths=_WIDTHS)))
    else:
        echo("\t".join(cell(shown[name]) for name in COLUMNS))


def _shown(fact: dict[str, Any]) -> dict[str, Any]:
    body = fact.get("body") or {}
    details = (f"{key}={cell(value)}" for key, value in body.items() if key not in _SHOWN_APART)
    return {**fact, "details": " ".join(details)}
