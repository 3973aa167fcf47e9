"""Measure the network between the nodes of a job, and name the slow link or node."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import click

from everstep.ids import new_id
from everstep.node_pairs import MeasuredPair, SlowNodes, slow_ones
from everstep_services.cli.api.client import Api, Params
from everstep_services.cli.cells import aligned, cell, counted
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import NAME, Invocation, NumberRange
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import with_reason
from everstep_services.cli.output import echo, print_record


@click.command()
@with_job_at_work
@click.argument("nodes", type=NAME, nargs=-1, metavar="[NODE]...")
@click.option(
    "--partners",
    type=click.IntRange(1, 64),
    default=8,
    metavar="N",
    help="Measure each node with at most N others (8).",
)
@click.option(
    "--beside-training",
    "is_beside_training",
    is_flag=True,
    help="Also measure nodes whose ranks run, which slows them down.",
)
@click.option(
    "--within",
    "within_s",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="How long to wait for the figures (60, and 5 more for each partner).",
)
@with_reason
def command(
    invocation: Invocation, /, *, job: str, within_s: float | None, reason: str, **details: Any
) -> int:
    """Have agents measure the network in pairs, and name slow nodes and links.

    By default all present nodes of the job take part, which takes a few seconds for each partner. A
    slow node is slow with every partner, a slow link only with one: to tell them apart, a node
    needs two partners.

    Exit codes: 0 no node is slow, 1 a node or link is slow or two nodes did not reach each other,
    5 some results did not come in time.
    """
    from everstep_services.cli.operator_requests import CommandRequest
    from everstep_services.cli.output import say

    with invocation.open_api() as api:
        test = NetworkTest.new(api, job)
        wish = CommandRequest("measure", reason, job, details={**details, "test": test.id})
        say(str(wish.tell(api)["text"]))
        told = await_figures(api, test, within_s or 60.0 + 5.0 * details["partners"])
    return print_figures(invocation, test, told)


Record = Mapping[str, Any]

_KIND = "network_measured"
_LOOK_EVERY_S = 0.5
_TABLE_MOST = 16
"""More nodes would not fit on a line."""
_NAMED_MOST = 16


@dataclass(frozen=True, slots=True)
class NetworkTest:
    """A network test of a job, and the place in the log behind which its facts are."""

    job: str
    id: str
    after: int

    @classmethod
    def new(cls, api: Api, job: str) -> Self:
        """One that nobody has asked for yet."""
        newest: Params = {"job": job, "kind": _KIND, "order": "desc", "limit": 1}
        items = api.get("facts", newest)["items"]
        return cls(job, new_id(), int(items[0]["n"]) if items else 0)


@dataclass(frozen=True, slots=True)
class NetworkFindings:
    """The result of a test."""

    links: Sequence[Record]
    """`from`, `to` and figures of each pair; 0 MiB/s if the two did not reach each other."""
    slow: Sequence[SlowNodes]
    untold: Mapping[str, str]
    """By node, why nothing is known about it."""

    @property
    def unreached(self) -> Sequence[Record]:
        """The pairs that did not reach each other, without nodes and links named as slow."""
        named = {node for item in self.slow for node in item.nodes}
        pairs = [link for link in self.links if not link["mib_s"]]
        return [link for link in pairs if not named & {link["from"], link["to"]}]

    @property
    def code(self) -> Exit:
        """Of the command."""
        if self.slow or self.unreached:
            return Exit.ERROR
        return Exit.TIMED_OUT if self.untold or not self.links else Exit.OK


def await_figures(api: Api, test: NetworkTest, within_s: float) -> dict[str, Record]:
    """The answer of each node, once all have answered or the time is over."""
    told: dict[str, Record] = {}
    after, deadline = test.after, time.monotonic() + within_s
    while True:
        asked: Params = {"job": test.job, "kind": _KIND, "after": after, "limit": 1000}
        for fact in api.pages("facts", asked, most=None):
            after = max(after, int(fact["n"]))
            if fact["body"]["test"] == test.id:
                told.setdefault(fact["body"]["node"], fact["body"])
        wanted = next(iter(told.values()), {"nodes": ()})["nodes"]
        if told and told.keys() >= set(wanted):
            return told
        if time.monotonic() >= deadline:
            if told:
                return told
            raise CliError(
                f"no figures came within {within_s:g} s; see everstep facts --job {test.job} "
                f"--kind {_KIND}",
                Exit.TIMED_OUT,
            )
        time.sleep(_LOOK_EVERY_S)


def judged(told: Mapping[str, Record]) -> NetworkFindings:
    """Who is slow. A node that did not take part is not judged."""
    nodes = sorted({node for body in told.values() for node in body["nodes"]})
    untold = {node: "its agent did not answer in time" for node in nodes if node not in told}
    untold |= {node: body["reason"] for node, body in told.items() if body.get("reason")}
    links = [
        {"from": node, "to": link["node"], **{k: v for k, v in link.items() if k != "node"}}
        for node, body in sorted(told.items())
        for link in body.get("links", ())
        if link["mib_s"] or link["node"] not in untold
    ]
    pairs = [MeasuredPair((link["from"], link["to"]), link["mib_s"]) for link in links]
    return NetworkFindings(links, slow_ones(pairs), untold)


def print_figures(invocation: Invocation, test: NetworkTest, told: Mapping[str, Record]) -> Exit:
    """Print the result; the exit code tells whether any node is slow."""
    findings = judged(told)
    if invocation.output is None or invocation.output == "table":
        for line in page(findings):
            echo(line)
    else:
        slow = [
            {"nodes": slow_node.nodes, "mib_s": slow_node.mib_s,
             "usual_mib_s": slow_node.usual_mib_s, "reason": slow_node.reason}
            for slow_node in findings.slow
        ]  # fmt: skip
        unreached = [(link["from"], link["to"]) for link in findings.unreached]
        record = {"test": test.id, "job": test.job, "slow": slow, "unreached": unreached,
                  "links": findings.links, "untold": findings.untold}  # fmt: skip
        print_record(invocation, "network_test", record, "test")
    return findings.code


def page(findings: NetworkFindings) -> Iterator[str]:
    """The lines about a test: the figures, then whom they speak against."""
    nodes = sorted({item[end] for item in findings.links for end in ("from", "to")})
    if 0 < len(nodes) <= _TABLE_MOST:
        yield "MiB/s"
        yield from aligned(_table(findings, nodes))
    for item in findings.slow:
        yield f"slow: {cell(item.reason)}"
    for link in findings.unreached[:_NAMED_MOST]:
        pair = f"{cell(link['from'])} and {cell(link['to'])}"
        yield f"not reached: {pair}: {cell(link.get('reason') or 'no figures')}"
    if (more := len(findings.unreached) - _NAMED_MOST) > 0:
        yield f"not reached: {counted(more, 'more pair')}, see -o json"
    for node, why in findings.untold.items():
        yield f"unknown: {cell(node)}: {cell(why)}"
    speeds = [item["mib_s"] for item in findings.links]
    if speeds and not findings.slow and not findings.unreached:
        usual = f"{statistics.median(speeds):.0f} MiB/s in the median"
        yield f"nobody is slow: {counted(len(speeds), 'pair')}, {usual}"


def _table(findings: NetworkFindings, nodes: Sequence[str]) -> Iterator[Sequence[str]]:
    speeds = {frozenset((link["from"], link["to"])): link["mib_s"] for link in findings.links}
    yield ("", *nodes)
    for row in nodes:
        reached = (speeds.get(frozenset((row, column))) for column in nodes)
        yield (row, *("" if speed is None else f"{speed:.0f}" for speed in reached))
