"""An incident on the screen: who, how, what was decided, when, and where the time went."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from everstep.units import size
from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.cells import (
    SHORT_ID,
    Record,
    aligned,
    budgets,
    cell,
    clean_lines,
    counted,
    ending,
    listed,
    moment,
    outcome,
    since,
    slow_rank,
    span,
    wall_s,
)
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.pages.incidents.ledger import (
    ledger_lines,
    saw_no_step,
    waited_for_steps,
)
from everstep_services.cli.pages.incidents.stall import stall_lines
from everstep_services.cli.pages.incidents.verdict import verdict_lines

_CLOSED_LATE = ": its ranks had run for a while, or ended"
_SLOW_SHOWN = 3
_ID = re.compile("[0-9A-Za-z_-]{1,128}")
_WHOLE_ID = 32
_BEGINNING = re.compile("[0-9a-f]{4,}")
_LISTED = 10_000
_FINDINGS = 1000
_CULPRITS = 6
_GONE = frozenset({"left_early", "node_lost"})
"""Kinds of verdicts about ranks that were gone when the round was stopped."""


def failing_saves(saves: Record) -> Iterator[str]:
    """A line for each tier whose last save has failed: why, and the newest checkpoint there."""
    for tier in saves["tiers"]:
        if not tier.get("is_failing"):  # an older service does not tell
            continue
        has_any = tier["committed_at"] is not None
        there = f"the newest checkpoint there is step {tier['committed_step']}"
        kept = there if has_any else "there is no checkpoint there"
        step = "" if tier["failed_step"] is None else f" of step {tier['failed_step']}"
        why = cell(tier["failed_reason"] or "no reason is on record")
        yield f"the last save{step} to {cell(tier['tier'])} has failed: {why}; {kept}"


def _no_incident(api: Api, job: str) -> str:
    failing = "; ".join(failing_saves(api.get(f"{job_path(job)}/saves")))
    if failing:
        return f"{job} has had no incident, but {failing}. See: everstep ckpt ls {job}"
    stalls = api.get(job_path(job))["stalls"]
    if api.get(f"{job_path(job)}/numerics", {"limit": 1})["items"]:
        return f"{job} has had no incident, but unexpected results. See: everstep numerics {job}"
    if not stalls:
        return f"nothing has gone wrong with {job} so far"
    return (
        f"{job} has had no incident, but ranks have stalled {counted(stalls, 'time')}: other ranks "
        f"were the reason, or they moved again at once. "
        f"See: everstep ranks {job}"
    )


def find_incident(api: Api, job: str, named: str | None) -> dict[str, Any]:
    """The incident whose id begins so, the newest one when none is named, with its story."""
    place = f"{job_path(job)}/incidents"
    if named is None or len(named) < 32:
        incidents = api.pages(place, {"limit": 1 if named is None else 1000}, most=1000)
        ids = [
            incident["incident"]
            for incident in incidents
            if incident["incident"].startswith(named or "")
        ]
        if named is None and not ids:
            raise CliError(_no_incident(api, job), Exit.NOT_FOUND)
        if named is not None and named not in ids:
            named = _only(ids, job, named)
        named = named or ids[0]
    record: dict[str, Any] = api.get(f"{place}/{quote(named, safe='')}")
    return record


def find_slow_job(api: Api, job: str) -> dict[str, Any] | None:
    """The job with its slow ranks, if the policy for them has stopped it.

    Also if nothing else has happened to it: there is no incident to tell of.
    """
    place = job_path(job)
    record: dict[str, Any] = api.get(place)
    if record["state"] == "stopped":
        of_round = {"round": record["round"], "limit": _FINDINGS}
        slow = api.get(f"{place}/stragglers", of_round)["items"]
        stopped_for = [
            finding
            for finding in slow
            if any((it["action"], it["outcome"]) == ("stop", "asked") for it in finding["actions"])
        ]
        if stopped_for:
            return {**record, "slow_ranks": stopped_for}
    if record["incidents"]:
        return None
    slow = api.get(f"{place}/stragglers", {"limit": _SLOW_SHOWN})["items"]
    return {**record, "slow_ranks": slow} if slow else None


def find_given_up(api: Api, job: str) -> dict[str, Any] | None:
    """The job, if its last allocation ended before the job was done, and no incident is the reason.

    For instance, too few nodes joined: the newest incident, if there is one, had recovered before.
    """
    place = job_path(job)
    record: dict[str, Any] = api.get(place)
    ends = [it for it in record["allocations"] if it["end_reason"]]
    if record["state"] != "idle" or not ends:
        return None
    newest = api.get(f"{place}/incidents", {"limit": 1})["items"]
    if newest and newest[0]["outcome"] != "recovered":
        return None
    return {**record, "last_end": max(ends, key=lambda it: it["ended_at"] or "")}


def given_up_lines(job: Record) -> Iterator[str]:
    """A job that is not done, and that nobody runs: why its last allocation ended."""
    name, end = cell(job["job"]), job["last_end"]
    code = "" if end["exit_code"] is None else f" (exit code {end['exit_code']})"
    when = f" at {moment(end['ended_at'])} UTC" if end["ended_at"] else ""
    yield f"{name}: its last allocation has ended{when}{code}: {cell(end['end_reason'])}"
    yield "  the job is not done: it continues when its agents are started again"
    if job["incidents"]:
        yield f"  its newest incident, which had recovered before: everstep incident show {name}"


def slow_job_lines(job: Record) -> Iterator[str]:
    """A job to which slow ranks have happened, its end first."""
    name = cell(job["job"])
    code = "" if job["exit_code"] is None else f" (exit code {job['exit_code']})"
    ended = (
        f": {cell(job['end_headline'])}" if job["end_headline"] else ", and had no incident so far"
    )
    yield f"{name}: {cell(job['state'])}{code}{ended}"
    for finding in job["slow_ranks"][:_SLOW_SHOWN]:
        section = f" in section {cell(finding['section'])}" if finding["section"] else ""
        yield f"  slow: {slow_rank(finding)}{section}, found at {moment(finding['found_at'])} UTC"
        yield f"    {cell(finding['reason'])}"
        for action in finding["actions"]:
            because = f", {cell(action['reason'])}" if action["reason"] else ""
            yield f"    {cell(action['action'])}: {cell(action['outcome'])}{because}"
    yield f"  all of its slow ranks: everstep stragglers {name} --history"
    if job["incidents"]:
        yield f"  its newest incident before: everstep incident show {name}"


def story(incident: Record) -> Iterator[str]:
    """The lines of a story, the most important first."""
    lasted = wall_s(incident)
    within = "within" if saw_no_step(incident) and waited_for_steps(incident) else "in"
    took = "" if lasted is None else f" {within} {span(lasted)}"
    name, job = cell(incident["incident"]), cell(incident["job"])
    yield f"incident {name} of {job}: {outcome(incident)}{took}"
    yield f"  {cell(incident['headline'])}"
    if incident["first_report"]:
        yield f"  first reported: {cell(incident['first_report'])}"
    if not incident["story"] and incident["extended_reason"]:
        yield f"  {cell(incident['extended_reason'])}"
    for part in PARTS.values():
        lines = list(part(incident))
        if lines:
            yield ""
            yield from lines


def find_any_incident(api: Api, named: str) -> dict[str, Any]:
    """The incident whose id begins so, of whichever job."""
    if not _ID.fullmatch(named):
        raise CliError(f"{named} is not the id of an incident: see everstep incidents", Exit.USAGE)
    if len(named) < _WHOLE_ID:
        incidents = api.pages("incidents", {"limit": 1000}, most=_LISTED)
        ids = [
            incident["incident"] for incident in incidents if incident["incident"].startswith(named)
        ]
        if not ids and _is_job(api, named):
            see = f"name one of its incidents: everstep incidents {named}"
            raise CliError(f"{named} is a job; {see}", Exit.USAGE)
        named = _only(ids, "", named)
    record: dict[str, Any] = api.get(f"incidents/{named}")
    return record


def find_named(api: Api, named: str) -> dict[str, Any]:
    """The newest incident of a job, or the one whose id begins so."""
    try:
        return find_incident(api, named, None)
    except CliError as error:
        if error.code is not Exit.NOT_FOUND or not is_incident_id(named):
            raise
        return find_any_incident(api, named)


def is_incident_id(text: str) -> bool:
    """It looks like an id, or the beginning of one; the name of a job may look so, too."""
    is_long = len(text) >= SHORT_ID and _ID.fullmatch(text) is not None
    return is_long or _BEGINNING.fullmatch(text) is not None


def _is_job(api: Api, named: str) -> bool:
    try:
        api.get(f"jobs/{named}")
    except CliError:
        return False
    return True


def _only(ids: list[str], job: str, named: str) -> str:
    whose, see = (job, f"everstep incidents {job}") if job else ("the record", "everstep incidents")
    if not ids:
        raise CliError(f"{whose} has no incident {named}: see {see}", Exit.NOT_FOUND)
    if len(ids) > 1:
        raise CliError(f"{len(ids)} incidents of {whose} begin with {named}: give more of the id")
    return ids[0]


def _who(incident: Record) -> Iterator[str]:
    yield "what happened"
    primary = incident["primary"]
    yield f"  {_where(incident)}"
    yield from stall_lines(incident)
    if primary is not None:
        yield from _exit(primary, incident["job"])
    elif (
        incident["first_report"]
        and incident["culprit_ranks"]
        and not incident.get("numerics")
        and (incident["verdict"] or {}).get("cause_kind") not in _GONE
        and any(it["ended_at"] for it in incident["rounds"] if it["round"] == incident["round"])
        and incident["next_round"] != incident["round"]
    ):
        yield "  no end of its own is on record: it may have been stopped with its round"
    yield from _slow(incident)
    others = [exit_ for exit_ in incident["exits"] if primary is None or exit_["n"] != primary["n"]]
    if others:
        shown = ", ".join(f"rank {exit_['rank']} ({ending(exit_)})" for exit_ in others[:5])
        more = f" and {len(others) - 5} more" if len(others) > 5 else ""
        yield f"  failed, too: {shown}{more}"


def _slow(incident: Record) -> Iterator[str]:
    """Ranks that were slow before anything went wrong: a slow one often fails next."""
    zero = incident["opened_at"]
    for finding in incident["slow_ranks"][:_SLOW_SHOWN]:
        section = f" in section {cell(finding['section'])}" if finding["section"] else ""
        when = f"found {span(since(zero, finding['found_at']))} before"
        over_s = since(zero, finding["cleared_at"]) if finding["cleared_at"] else 0.0
        if over_s > 0:
            when = f"{when}, until {span(over_s)} before"
        yield f"  was slow: {slow_rank(finding)}{section}, {when}"
    more = len(incident["slow_ranks"]) - _SLOW_SHOWN
    if more > 0:
        yield f"  and {more} more: everstep stragglers {cell(incident['job'])} --history"


def nodes_of_culprits(incident: Record) -> list[str] | None:
    """The nodes that the verdict names, else those of its ranks, else the one in its sentence.

    Of a warden that ended, neither the node nor a rank is a culprit.
    """
    of_ranks = incident.get("culprit_rank_nodes")  # an older service does not tell
    nodes: list[str] | None = incident["culprit_nodes"] or of_ranks or None
    reported, headline = incident.get("node"), incident.get("headline") or ""
    if nodes or incident["culprit_ranks"] or not reported:
        return nodes
    is_named = re.search(rf"(?<![\w.-]){re.escape(reported)}(?![\w.-]*\w)", headline)
    return [reported] if is_named else None


def _where(incident: Record) -> str:
    primary = incident["primary"] or {}
    of_rank = ("rank", "node", "step", "section")
    about = incident
    if incident["first_report"]:  # it was about somebody else
        ranks, nodes = incident["culprit_ranks"] or (), nodes_of_culprits(incident)
        rank, node = (listed(names, _CULPRITS) if names else None for names in (ranks, nodes))
        about = {**incident, **dict.fromkeys(of_rank), "rank": rank, "node": node}
    # A later report, or the verdict, may have explained the first one.
    about = {**about, **{key: primary[key] for key in of_rank if primary.get(key) is not None}}
    named = ("rank", "node", "round", "step", "phase", "section")
    parts = [f"{name} {cell(about[name])}" for name in named if about[name] is not None]
    return ", ".join(parts) or cell(incident["trigger"])


def _exit(exit_: Record, job: str) -> Iterator[str]:
    if exit_["how"] == "unknown":
        yield "  its exit code or signal is not known"
    else:
        yield f"  {ending(exit_)} after {span(exit_['lasted_s'])}"
    if exit_["traceback"]:
        yield from (f"  │ {line}" for line in clean_lines(exit_["traceback"]))
    elif exit_["error_name"]:
        yield f"  {cell(exit_['error_name'])}: {cell(exit_['error_text'])}"
    elif exit_["first_error"]:
        told = "why" if exit_["how"] == "unknown" else "it wrote"
        yield f"  {told}: {cell(exit_['first_error'])}"
    if exit_["has_log"]:
        yield f"  its log: everstep logs {job} --round {exit_['round']} --rank {exit_['rank']}"


def _decisions(incident: Record) -> Iterator[str]:
    for action in incident["actions"]:
        only_said = ", only recorded (observe mode)" if action["mode"] == "observe" else ""
        rule = f", by rule {cell(action['rule'])}" if action["rule"] else ""
        yield f"decided: {cell(action['action'])}{rule}{only_said}"
        if action["reason"]:
            yield f"  {cell(action['reason'])}"
        if action["budgets"]:
            yield f"  left: {budgets(action['budgets'])}"
        for other in action["considered"] or ():
            yield f"  not {cell(other['action'])}: {cell(other['rejected'])}"
        for unknown in action["unknowns"] or ():
            yield f"  not known: {cell(unknown)}"
        if action["outcome"]:
            yield f"  {cell(action['outcome'])}: {cell(action['outcome_reason'])}"


def _evidence(incident: Record) -> Iterator[str]:
    rows = []
    rounds = {piece["round"] for piece in incident["evidence"]}
    for piece in incident["evidence"]:
        text = cell(piece["summary"])
        if piece["blob"] is None:
            text = f"none: {cell(piece['missing_reason'] or text)}"
        of_round = () if len(rounds) < 2 else (f"round {cell(piece['round'])}",)
        rank = "" if piece["rank"] is None else f"rank {piece['rank']}"
        held = "" if piece["blob"] is None else size(piece["blob"]["size_bytes"])
        rows.append((piece["kind"], *of_round, piece["node"], rank, held, text))
    if rows:
        yield "evidence"
        yield from aligned(rows)
    gone = [piece["gone_reason"] for piece in incident["evidence"] if piece["gone_reason"]]
    if gone:
        are = f"{counted(len(gone), 'piece')} {'is' if len(gone) == 1 else 'are'}"
        yield f"  {are} gone: {cell(gone[0])}"
    expiring = [
        piece["expires_at"]
        for piece in incident["evidence"]
        if piece["expires_at"] and not piece["gone_reason"]
    ]
    if expiring:
        are = f"{counted(len(expiring), 'piece')} {'is' if len(expiring) == 1 else 'are'}"
        yield f"  {are} on the bus only, until {moment(min(expiring))} UTC"


def _timeline(incident: Record) -> Iterator[str]:
    zero = incident["opened_at"]
    if zero is None:
        return
    moments: list[tuple[object, str]] = [
        (incident["progress_at"], "last progress"),
        (zero, "first report"),
        *((row["decided_at"], f"decided: {cell(row['action'])}") for row in incident["actions"]),
        (incident["closed_at"], outcome(incident) + _CLOSED_LATE * saw_no_step(incident)),
    ]
    for row in incident["rounds"]:
        number = row["round"]
        moments.append((row["ended_at"], f"round {number} ended"))
        if number != incident["round"]:
            nodes = counted(row["nodes"] or 0, "node")
            moments.append((row["formed_at"], f"round {number} formed: {nodes}{_moves(incident)}"))
            warm = f", {row['warm_ranks']} warm" if row["warm_ranks"] else ""
            kept = row.get("healed_kept")  # an older service does not tell
            ranks = f"{counted(row['world_size'] or 0, 'rank')}{f', {kept} kept' if kept else ''}"
            moments.append((row["started_at"], f"round {number} runs: {ranks}{warm}"))
            moments.append((row["first_step_at"], f"first step of round {number}"))
    yield f"timeline, from the first report at {moment(zero)} UTC"
    events = [(since(at, zero), text) for at, text in moments if at]
    for at_s, text in sorted(events, key=lambda row: row[0]):
        yield f"  {at_s:+9.3f} s  {text}"


def _moves(incident: Record) -> str:
    out, in_ = ([cell(name) for name in incident[key][:3]] for key in ("nodes_out", "nodes_in"))
    texts = (
        f", without {', '.join(out)}" if out else "",
        f", with {', '.join(in_)}" if in_ else "",
    )
    return "".join(texts)


def _numerics(incident: Record) -> Iterator[str]:
    case = incident.get("numerics")  # an older service does not tell
    if case:
        yield "the result that cannot be right"
        yield from (f"  {cell(sentence)}" for sentence in case["story"])


PARTS: Mapping[str, Callable[[Record], Iterator[str]]] = {
    "Verdict": verdict_lines,
    "What happened": _who,
    "Numerics": _numerics,
    "Decisions": _decisions,
    "Evidence": _evidence,
    "Timeline": _timeline,
    "Where the time went": ledger_lines,
}
"""The parts of a story, the most important first."""
