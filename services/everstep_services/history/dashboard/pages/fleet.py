"""`/`: what needs a person first, then how everything is."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

from starlette.requests import Request

from everstep.job_states import AT_WORK, OVER, WITH_RANKS
from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.formats import (
    duration,
    is_excluded,
    moment,
    percent,
    words,
)
from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.rest import Reader, RestAnswer, path_of, together

_JOBS = 200
_NODES = 500
_SHOWN = 50
_FAILING = 500
_READ = 10
_REPORTED_WITHIN = timedelta(seconds=90)
"""Copies in memory and to peers are reported once a minute."""
_RECENT = timedelta(hours=24)
_OF_A_STOP = ("operator_acted", "allocation_started")
_ACTS = 20
_SAVE_LAG_S = 3600.0
_WAITING_READ = 20
"""The rounds of this number of jobs that wait for nodes are read: of those not heard of for the
longest time, because the others may only restart."""
_WAIT = timedelta(minutes=2)
"""A job that waits longer for nodes needs a person; a restart takes seconds."""

_ON_PURPOSE = frozenset({"injected", "scheduler"})
"""Causes of incidents in which nothing is broken; a job that then waits too long is listed."""


@dataclass(frozen=True, slots=True)
class Concern:
    """One thing that a person should look at."""

    tone: str
    kind: str
    text: str
    href: str
    at: str | None
    detail: str = ""

    @property
    def order(self) -> tuple[int, str]:
        """The worst first, then the newest."""
        return ({"bad": 0, "warn": 1}.get(self.tone, 2), _inverted(self.at))


async def fleet(reader: Reader, _request: Request) -> Page:
    """All jobs and nodes at one glance."""
    now = reader.rest.now()
    (
        jobs,
        opened,
        recent,
        nodes,
        control,
        newest,
        goodput,
        failing,
        lost,
        delays,
        slow,
    ) = await together(
        reader.get_or_not("jobs", limit=_JOBS, sort="-updated"),
        reader.get_or_not("incidents", open=True, limit=_SHOWN),
        reader.get_or_not("incidents", limit=8),
        reader.get_or_not("nodes", attention=True, limit=_NODES),
        reader.get_live("control"),
        reader.get_or_not("facts", order="desc", limit=8),
        reader.get_or_not("goodput"),
        reader.get_or_not("saves", failing=True, state=AT_WORK, limit=_SHOWN),
        reader.get_or_not(
            "saves", failing=True, state=OVER, heard_since=_day_before(now), limit=_FAILING
        ),
        reader.get_or_not("save-delays", waiting=True, state=AT_WORK, limit=_NODES),
        reader.get_or_not("stragglers", state="open", limit=_SHOWN),
    )
    items = jobs.items
    forming = [job for job in items if job["state"] == "forming"][-_WAITING_READ:]
    stopped = [job for job in items if job["state"] == "stopped" and _is_recent(job, now)][:_READ]
    idle = [job for job in items if job["state"] == "idle" and _is_recent(job, now)][:_READ]
    asked = await together(
        *(reader.get_or_not(path_of("jobs", job["job"], "rounds"), limit=2) for job in forming),
        *(
            reader.get_or_not("facts", job=job["job"], kind=_OF_A_STOP, order="desc", limit=_ACTS)
            for job in stopped
        ),
        *(reader.get_or_not(path_of("jobs", job["job"])) for job in idle),
        *(
            reader.get_or_not("facts", job=job["job"], kind="operator_acted", order="desc", limit=1)
            for job in idle
        ),
    )
    answers = iter(asked)
    rounds, stops, details, acts = (
        [*islice(answers, len(jobs))] for jobs in (forming, stopped, idle, idle)
    )
    working = [job for job in items if job["state"] in AT_WORK]

    def concerns() -> list[Concern]:
        concerns = [
            *_of_control(control.data, {it["job"] for it in items if it["state"] in OVER}),
            *_of_incidents(opened.items),
            *_of_ended(items),
            *_of_stopped(zip(stopped, stops, strict=True)),
            *_of_idle(zip(idle, details, acts, strict=True)),
            *_of_waiting(zip(forming, rounds, strict=True), now),
            *_of_nodes(nodes.items, now),
            *_of_failing(failing.items, now),
            *_of_lost_saves(lost.items, items, now),
            *_of_delays(delays.items),
            *_of_slow(slow.items),
        ]
        return sorted(concerns, key=lambda concern: concern.order)

    parts = (
        ("Jobs", jobs), ("Incidents", opened), ("Nodes", nodes), ("Switches", control),
        ("Goodput", goodput), ("Saves", failing), ("Last saves", lost), ("Waiting saves", delays),
        ("Slow ranks", slow),
    )  # fmt: skip
    newest_at = max((job["updated_at"] or "" for job in items), default="")
    return Page(
        "fleet.html",
        {
            "title": "Fleet",
            "live": "",
            "concerns": attempt(concerns),
            "jobs": jobs,
            "control": control,
            "working": working,
            "ended": [job for job in items if job["state"] not in AT_WORK][:6],
            "counts": _counts(items),
            "incidents": recent,
            "facts": newest,
            "goodput": goodput,
            "shares": attempt(
                lambda: drawings.shares(goodput.data["seconds"] if goodput.data else None)
            ),
            "newest_at": newest_at,
            "nodes_out": sum(is_excluded(node, now) for node in nodes.items),
            "ranks": sum(job["world_size"] or 0 for job in working if job["state"] in WITH_RANKS),
            "has_any": bool(items),
            "unread": [(name, answer) for name, answer in parts if answer.problem],
        },
    )


def _counts(jobs: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job["state"]] = counts.get(job["state"], 0) + 1
    return dict(sorted(counts.items(), key=lambda counted: -counted[1]))


def _of_control(control: Mapping[str, Any] | None, over: Collection[str]) -> Iterator[Concern]:
    """Switches that hold something back; not those of jobs that are over."""
    if control is None:
        return
    for switches in (control["cluster"], *control["jobs"]):
        if not switches["is_braked"] or switches["job"] in over:
            continue
        about = f"job {switches['job']}" if switches["job"] else "every job"
        text = f"The brake is on for {about}: Everstep only restarts what failed"
        by = f"{switches['braked_by'] or 'somebody'}: {switches['brake_reason'] or 'no reason'}"
        yield Concern("warn", "brake", text, "/control", None, by)
    if control["breaker_opened_at"]:
        text = "The breaker is open: checks excluded too many nodes at once, and are not believed"
        yield Concern("bad", "breaker", text, "/control", control["breaker_opened_at"])


def _of_incidents(incidents: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    """Open incidents, without those that a person or a scheduler has brought about on purpose."""
    for incident in incidents:
        if incident["cause"] in _ON_PURPOSE:
            continue
        text = incident["headline"] or words(incident["trigger"])
        href = f"/{path_of('incidents', incident['incident'])}"
        yield Concern(
            "bad", "incident", text, href, incident["opened_at"], f"job {incident['job']}"
        )


def _of_ended(jobs: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    heard = [at for at in (moment(job["updated_at"]) for job in jobs) if at is not None]
    newest = max(heard, default=None)
    for job in jobs:
        ended = moment(job["ended_at"])
        if job["state"] != "failed" or ended is None or newest is None:
            continue
        if newest - ended <= _RECENT:
            text = f"{job['job']} failed: {job['end_headline'] or 'no reason is on record'}"
            href = f"/{path_of('jobs', job['job'])}"
            yield Concern("bad", "job", text, href, job["ended_at"], _owner(job))


def _owner(job: Mapping[str, Any]) -> str:
    return f"user {job['user']}" if job["user"] else ""


def _day_before(now: datetime) -> str:
    """A day before the present hour: a question that stays the same is remembered once."""
    return (now.replace(minute=0, second=0, microsecond=0) - _RECENT).isoformat()


def _is_recent(job: Mapping[str, Any], now: datetime) -> bool:
    heard = moment(job["updated_at"])
    return heard is not None and now - heard <= _RECENT


def _of_stopped(jobs: Iterable[tuple[Mapping[str, Any], RestAnswer]]) -> Iterator[Concern]:
    """Jobs that a policy, not a person, has stopped in the last day."""
    for job, acts in jobs:
        if _is_by_person(acts.items):
            continue
        text = f"{job['job']} was stopped: {job['end_headline'] or 'no reason is on record'}"
        href, user = f"/{path_of('jobs', job['job'])}", _owner(job)
        yield Concern("bad", "job", text, href, job["ended_at"], user)


def _is_by_person(facts: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a person has stopped the allocation that came last: `facts`, the newest first."""
    for fact in facts:
        if fact["kind"] == "allocation_started":
            return False
        act = fact["body"]
        is_stop = act.get("action") == "stop_job" and act.get("outcome") == "accepted"
        if is_stop and act.get("origin") != "service":
            return True
    return False


def _of_idle(jobs: Iterable[tuple[Mapping[str, Any], RestAnswer, RestAnswer]]) -> Iterator[Concern]:
    """Jobs that have given up waiting for nodes, or whose agents vanished, in the last day.

    A job that its owner has interrupted needs nobody.
    """
    for job, detail, acts in jobs:
        last = next(iter(detail.data["allocations"]), None) if detail.data else None
        if detail.data and last is None:
            continue  # others record facts of it
        began = (last and last["started_at"]) or ""
        if any(act["body"]["action"] == "interrupt" and act["at"] >= began for act in acts.items):
            continue
        reason = (last and last["end_reason"]) or "its last allocation has ended"
        text = f"{job['job']} is not done, and no node runs it: {reason}"
        href, user = f"/{path_of('jobs', job['job'])}", _owner(job)
        at = (last and last["ended_at"]) or job["updated_at"]
        yield Concern("warn", "job", text, href, at, user)


def _of_waiting(
    jobs: Iterable[tuple[Mapping[str, Any], RestAnswer]], now: datetime
) -> Iterator[Concern]:
    """Jobs without ranks, because their next round does not get the nodes that it needs."""
    for job, answer in jobs:
        rounds = answer.items
        is_forming = bool(rounds) and rounds[0]["state"] == "forming"
        newest = rounds[0] if is_forming else {}
        before = rounds[1:] if is_forming else rounds
        at = before[0]["ended_at"] if before else job["started_at"]
        since = moment(at)
        if since is None or now - since < _WAIT:
            continue
        why = newest.get("waiting_reason") or "no round has formed"
        waits = duration((now - since).total_seconds())
        text = f"{job['job']} has waited for nodes for {waits}: {why}"
        href, user = f"/{path_of('jobs', job['job'])}", _owner(job)
        yield Concern("warn", "job", text, href, at, user)


def _of_nodes(nodes: Sequence[Mapping[str, Any]], now: datetime) -> Iterator[Concern]:
    for node in nodes:
        href = f"/{path_of('nodes', node['node'])}"
        if node["is_healthy"] is False:
            text, at = node["health_reason"] or "a check failed", node["health_at"]
            yield Concern("bad", "node", f"{node['node']} is unhealthy: {text}", href, at)
        elif is_excluded(node, now):
            text, at = node["excluded_reason"] or "no reason", node["excluded_at"]
            by = f"by {node['excluded_by'] or 'somebody'}"
            yield Concern("warn", "node", f"{node['node']} is excluded: {text}", href, at, by)
        else:
            text, at = node["suspect_reason"] or "no reason", node["suspect_at"]
            strikes = f"{node['strikes'] or 0} of {node['strikes_limit'] or '?'} strikes"
            yield Concern("warn", "node", f"{node['node']} is suspect: {text}", href, at, strikes)


def _of_failing(saves: Sequence[Mapping[str, Any]], now: datetime) -> Iterator[Concern]:
    for tier in saves:
        failed_at = moment(tier["failed_at"])
        is_new = failed_at is not None and now - failed_at < _REPORTED_WITHIN
        if tier["tier"] in {"memory", "peer"} and is_new:
            continue  # the next copy may be there, and not be reported yet
        text = f"Saves to {tier['tier']} fail: {tier['failed_reason'] or 'no reason'}"
        href = f"/{path_of('jobs', tier['job'], 'checkpoints')}"
        detail = f"job {tier['job']}"
        yield Concern("bad", "checkpoint", text, href, tier["failed_at"], detail)


def _of_lost_saves(
    saves: Sequence[Mapping[str, Any]], jobs: Sequence[Mapping[str, Any]], now: datetime
) -> Iterator[Concern]:
    """Jobs that have ended within the last day without the checkpoint of their end."""
    ended = {job["job"]: moment(job["ended_at"]) for job in jobs}
    for tier in saves:
        at = ended.get(tier["job"])
        if tier["tier"] != "global" or at is None or now - at > _RECENT:
            continue
        newest = tier["committed_step"]
        kept = (
            "it has no checkpoint" if newest is None else f"its newest checkpoint is step {newest}"
        )
        reason = tier["failed_reason"] or "no reason is on record"
        text = f"{tier['job']} has ended, and its last save has failed: {reason}; {kept}"
        href = f"/{path_of('jobs', tier['job'], 'checkpoints')}"
        yield Concern("bad", "checkpoint", text, href, tier["failed_at"], f"job {tier['job']}")


def _of_delays(delays: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    for delay in delays:
        if (delay["delay_lag_s"] or 0) > _SAVE_LAG_S:
            text = f"Saves of {delay['node']} wait for {duration(delay['delay_lag_s'])}"
            href = f"/{path_of('jobs', delay['job'], 'checkpoints')}"
            detail = f"job {delay['job']}"
            yield Concern("warn", "checkpoint", text, href, delay["delay_at"], detail)


def _of_slow(findings: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    for finding in findings:
        cause = "" if finding["cause"] in {None, "unknown"} else f" ({words(finding['cause'])})"
        price = finding["slowdown_ratio"]
        costs = f": {finding['job']} would be {percent(price)} faster without it" if price else ""
        text = f"Rank {finding['rank']} on {finding['node']} is slow{cause}{costs}"
        href = f"/{path_of('jobs', finding['job'], 'stragglers')}"
        yield Concern("warn", "slow rank", text, href, finding["found_at"], f"job {finding['job']}")


def _inverted(at: str | None) -> str:
    when = moment(at)
    return "9" if when is None else f"{10**12 - when.timestamp():020.3f}"
