"""Nodes on the screen: whether they are there, can be trusted, and what was found on them."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import Record, aligned, brief, cell, counted, moment, span
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.operator_requests import quoted
from everstep_services.cli.output import echo, print_page, print_record, print_records, say, say_cut

COLUMNS = ("node", "state", "job", "healthy", "strikes", "excluded", "reason", "probes")
WIDE = (
    *COLUMNS, "address", "failure_domain", "nvlink_domain", "device", "joins", "losses", "refusals",
    "ranks_failed", "stalls", "version",
)  # fmt: skip
_LOOK_EVERY_S = 0.5


def print_nodes(invocation: Invocation, api: Api, params: dict[str, Any], most: int) -> None:
    """The nodes that are asked for."""
    page = {**params, "limit": min(most, 1000)}
    nodes = list(api.pages("nodes", page, most=most, when_cut=say_cut))
    if not nodes:
        say("no such nodes")
    is_for_people = invocation.output in {None, "table", "wide"}
    columns = WIDE if invocation.output == "wide" else COLUMNS
    print_records(invocation, "node", map(_shown, nodes) if is_for_people else nodes, columns)


def print_node(invocation: Invocation, api: Api, name: str) -> None:
    """One node: its standing, the reason, and the results of its last examination."""
    print_page(invocation, "node", api.get(f"nodes/{quoted(name)}"), node_page)


def node_page(node: Record) -> Iterator[str]:
    """The lines about one node."""
    standing, now = node["standing"], node["now"]
    state = node["state"] if standing is None else standing["state"]
    reason = standing["reason"] if standing else node["standing_missing"]
    yield f"{cell(node['node'])}: {cell(state or 'unknown')}{f': {cell(reason)}' if reason else ''}"
    yield from aligned([(name, text) for name, text in _facts(node, now) if text])
    probes = node["probes"]
    if probes:
        yield ""
        yield from aligned(map(_probe, probes))
    check = node["last_check"]
    if check is not None:
        yield ""
        yield from check_lines(check)


def check_lines(check: Record) -> Iterator[str]:
    """The results of a node's examination, the worst first."""
    names = ", ".join(map(cell, check["checks"] or ())) or "nothing"
    verdict = {True: "healthy", False: "not healthy"}.get(check["is_healthy"], "not known")
    when, took = moment(check["at"]), span(check["took_s"])
    occasion = cell(check["occasion"])
    if check["occasion"] == "probe":
        failures = f", failed {check['failures']} times in a row" if check["failures"] else ""
        acted = ", ended a round" if check["is_acted_on"] else ""
        occasion = f"{occasion}, policy {cell(check['policy'])}{failures}{acted}"
    yield f"checked {when} UTC ({occasion}, {took}): {verdict}; ran {names}"
    order = ("failed", "warning", "unknown", "unsupported", "ok")
    results = sorted(
        check["results"] or (),
        key=lambda result: order.index(result["state"]) if result["state"] in order else len(order),
    )
    yield from aligned(
        (result["state"], result["check"], result["subject"], result["reason"] or result["code"])
        for result in results
    )


def print_check(invocation: Invocation, check: dict[str, Any]) -> None:
    """The results, for people or as a record."""
    if invocation.output is None:
        for line in check_lines(check):
            echo(line)
    else:
        print_record(invocation, "node_check", check, "id")


def newest_check(api: Api, node: str) -> int:
    """The place in the log of the last examination; 0 if there was none."""
    try:
        items = api.get(f"nodes/{quoted(node)}/checks", {"limit": 1})["items"]
    except CliError as error:
        if error.code is not Exit.NOT_FOUND:
            raise
        return 0
    return int(items[0]["n"]) if items else 0


def await_check(api: Api, node: str, after: int, within_s: float) -> dict[str, Any]:
    """The next check that was asked for, after that place in the log."""
    deadline = time.monotonic() + within_s
    while True:
        items = api.get(f"nodes/{quoted(node)}/checks", {"limit": 20})["items"]
        for check in reversed(items):
            if check["n"] > after and check["occasion"] == "operator":
                result: dict[str, Any] = check
                return result
        if time.monotonic() >= deadline:
            raise CliError(
                f"nothing was heard of the checks of {node} within {within_s:g} s: they may still "
                f"run; see everstep node show {node}",
                Exit.TIMED_OUT,
            )
        time.sleep(_LOOK_EVERY_S)


def _facts(node: Record, now: Record | None) -> Iterator[tuple[str, str]]:
    if node["state_reason"]:
        yield cell(node["state"]), f"{moment(node['state_at'])}: {cell(node['state_reason'])}"
    yield "job", cell(node["job"])
    yield "address", cell(node["address"])
    yield "device", cell(node["device"])
    yield "place", "/".join(map(cell, node["topology"] or [node["failure_domain"] or ""]))
    yield "nvlink", cell(node["nvlink_domain"])
    if now is not None:
        heard = f"heard {span(now['heard_age_s'])} ago"
        slot = "spare" if now["slot"] is None else f"slot {now['slot']}"
        watch = f", stalls: {cell(now['watch'])}" if now["watch"] else ""
        if now["is_stale"]:
            yield "agent", f"silent: last {heard}, in round {now['round']}, {slot}"
        else:
            yield "agent", f"{cell(now['state'])}, round {now['round']}, {slot}, {heard}{watch}"
        failed = ", ".join(map(cell, now.get("probes_failed") or ()))
        share = f"{now.get('probe_cpu_ratio') or 0:.2%} of a core"
        yield "probes", f"failed: {failed}; {share}" if failed else share
    yield "clock", clock_text(node)
    limit = f" of {node['strikes_limit']}" if node["strikes_limit"] else ""
    yield "strikes", f"{node['strikes']}{limit}" if node["strikes"] else ""
    if node["is_suspect"]:
        helps = f"; what would help: {cell(node['suspect_class'])}" if node["suspect_class"] else ""
        yield (
            "suspect",
            f"since {moment(node['suspect_at'])}: {cell(node['suspect_reason'])}{helps}",
        )
    yield "excluded", _exclusion(node)
    if node["spared_reason"]:
        text = f"{moment(node['spared_at'])}: {cell(node['spared_reason'])}"
        yield "spared", f"{text} (health only observes)"
    yield "record", _record(node)


def _probe(probe: Record) -> tuple[str, ...]:
    """A probe in a row of cells: its state, its limits and what its failure leads to."""
    state = "failed" if probe["has_failed"] else cell(probe["state"]) or "not run yet"
    count = f"{probe['failures']} of {probe['failures_limit']} failures in a row"
    runs = f"every {span(probe['every_s'])}"
    return "probe", cell(probe["check"]), state, runs, cell(probe["policy"]), count


def _exclusion(node: Record) -> str:
    if not node["is_excluded"]:
        return ""
    until = f"until {moment(node['excluded_until_at'])}"
    ends = until if node["excluded_until_at"] else "until somebody includes it"
    return f"{ends}, by {cell(node['excluded_by'])}: {cell(node['excluded_reason'])}"


def _record(node: Record) -> str:
    names = (
        ("joins", "join"), ("losses", "loss"), ("refusals", "refusal"), ("stalls", "stall"),
        ("ranks_failed", "failed rank"),
    )  # fmt: skip
    counts = [(node[key] or 0, one) for key, one in names]
    return ", ".join(_plural(count, one) for count, one in counts if count)


def _plural(count: int, noun: str) -> str:
    return f"{count} losses" if noun == "loss" and count > 1 else counted(count, noun)


def _shown(node: Record) -> dict[str, Any]:
    reason = node["state_reason"]
    if node["is_excluded"]:
        reason = node["excluded_reason"]
    elif node["is_suspect"]:
        reason = node["suspect_reason"]
    elif node["is_healthy"] is False:
        reason = node["health_reason"]
    reason = "; ".join(text for text in (clock_text(node), reason) if text)
    excluded = ""
    if node["is_excluded"]:
        excluded = moment(node["excluded_until_at"]) if node["excluded_until_at"] else "yes"
    shown = {
        "healthy": node["is_healthy"],
        "probes": _probes(node["probes"]),
        "excluded": excluded,
        "reason": brief(reason),
    }
    return {**node, **shown}


def clock_text(node: Record) -> str:
    """How wrong the clock of a node is; empty if it is right, or not known to be wrong."""
    offset_s = node.get("clock_offset_s")
    if offset_s is None or not node.get("is_clock_wrong"):
        return ""
    return f"its clock is {span(abs(offset_s))} {'ahead' if offset_s > 0 else 'behind'}"


def _probes(probes: Sequence[Record]) -> str:
    """The probes that have failed; otherwise, how many fail now, and how many there are."""
    names = [probe["check"] for probe in probes if probe["has_failed"]]
    if names:
        return f"failed: {','.join(map(cell, names))}"
    count, failing = len(probes), sum(probe["failures"] > 0 for probe in probes)
    return f"{failing} of {count} failing" if failing else str(count or "")
