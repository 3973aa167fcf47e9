"""`/`: what needs a person first, then how everything is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from starlette.requests import Request

from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.formats import duration, moment, words
from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.rest import Reader, RestAnswer, path_of, together

_JOBS = 200
_LOOKED_INTO = 12
"""How many running jobs have their saves examined."""
_RECENT = timedelta(hours=24)
_AT_WORK = frozenset({"running", "starting", "forming", "restarting", "waiting"})
_SAVE_LAG_S = 3600.0


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
    jobs, opened, recent, suspects, excluded, sick, control, newest, goodput = await together(
        reader.get_or_not("jobs", limit=_JOBS, sort="-updated"),
        reader.get_or_not("incidents", open=True, limit=50),
        reader.get_or_not("incidents", limit=8),
        reader.get_or_not("nodes", suspect=True, limit=50),
        reader.get_or_not("nodes", excluded=True, limit=50),
        reader.get_or_not("nodes", healthy=False, limit=50),
        reader.get_or_not("control"),
        reader.get_or_not("facts", order="desc", limit=8),
        reader.get_or_not("goodput"),
    )
    items = _items(jobs)
    working = [job for job in items if job["state"] in _AT_WORK]
    saves = await _saves(reader, working[:_LOOKED_INTO])
    concerns = [
        *_of_control(control.data),
        *_of_incidents(_items(opened)),
        *_of_ended(items),
        *_of_nodes(_items(sick), _items(excluded), _items(suspects)),
        *_of_saves(saves),
    ]
    newest_at = max((job["updated_at"] or "" for job in items), default="")
    return Page(
        "fleet.html",
        {
            "title": "Fleet",
            "live": "",
            "concerns": sorted(concerns, key=lambda concern: concern.order),
            "jobs": jobs,
            "working": working,
            "ended": [job for job in items if job["state"] not in _AT_WORK][:6],
            "counts": _counts(items),
            "incidents": recent,
            "facts": newest,
            "goodput": goodput,
            "shares": drawings.shares(goodput.data["seconds"] if goodput.data else None),
            "newest_at": newest_at,
            "nodes_out": len(_items(excluded)),
            "ranks": sum(job["world_size"] or 0 for job in working),
            "has_any": bool(items),
        },
    )


def _items(answer: RestAnswer) -> Sequence[Mapping[str, Any]]:
    items: Sequence[Mapping[str, Any]] = () if answer.data is None else answer.data["items"]
    return items


async def _saves(reader: Reader, jobs: Sequence[Mapping[str, Any]]) -> Sequence[RestAnswer]:
    return await together(*(reader.get_or_not(path_of("jobs", j["job"], "saves")) for j in jobs))


def _counts(jobs: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    counts: dict[str, int] = {}
    for job in jobs:
        counts[job["state"]] = counts.get(job["state"], 0) + 1
    return dict(sorted(counts.items(), key=lambda counted: -counted[1]))


def _of_control(control: Mapping[str, Any] | None) -> Iterator[Concern]:
    if control is None:
        return
    for switches in (control["cluster"], *control["jobs"]):
        if not switches["is_braked"]:
            continue
        about = f"job {switches['job']}" if switches["job"] else "every job"
        text = f"The brake is on for {about}: Everstep only observes"
        by = f"{switches['braked_by'] or 'somebody'}: {switches['brake_reason'] or 'no reason'}"
        yield Concern("warn", "brake", text, "/control", None, by)
    if control["breaker_opened_at"]:
        text = "The breaker is open: checks excluded too many nodes at once, and are not believed"
        yield Concern("bad", "breaker", text, "/control", control["breaker_opened_at"])


def _of_incidents(incidents: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    for incident in incidents:
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
            yield Concern(
                "bad", "job", text, href, job["ended_at"], f"user {job['user'] or 'unknown'}"
            )


def _of_nodes(*groups: Sequence[Mapping[str, Any]]) -> Iterator[Concern]:
    seen: set[str] = set()
    for node in (node for group in groups for node in group):
        if node["node"] in seen:
            continue
        seen.add(node["node"])
        href = f"/{path_of('nodes', node['node'])}"
        if node["is_healthy"] is False:
            text, at = node["health_reason"] or "a check failed", node["health_at"]
            yield Concern("bad", "node", f"{node['node']} is unhealthy: {text}", href, at)
        elif node["is_excluded"]:
            text, at = node["excluded_reason"] or "no reason", node["excluded_at"]
            by = f"by {node['excluded_by'] or 'somebody'}"
            yield Concern("warn", "node", f"{node['node']} is excluded: {text}", href, at, by)
        else:
            text, at = node["suspect_reason"] or "no reason", node["suspect_at"]
            strikes = f"{node['strikes'] or 0} of {node['strikes_limit'] or '?'} strikes"
            yield Concern("warn", "node", f"{node['node']} is suspect: {text}", href, at, strikes)


def _of_saves(answers: Sequence[RestAnswer]) -> Iterator[Concern]:
    for answer in answers:
        if answer.data is None:
            continue
        job = answer.data["job"]
        href = f"/{path_of('jobs', job, 'checkpoints')}"
        for tier in answer.data["tiers"]:
            failed, good = moment(tier["failed_at"]), moment(tier["committed_at"])
            if failed is not None and (good is None or failed > good):
                text = f"Saves to {tier['tier']} fail: {tier['failed_reason'] or 'no reason'}"
                at = tier["failed_at"]
                yield Concern("bad", "checkpoint", text, href, at, f"job {job}")
        for delay in answer.data["delays"]:
            if (delay["waiting"] or 0) > 0 and (delay["delay_lag_s"] or 0) > _SAVE_LAG_S:
                lag = duration(delay["delay_lag_s"])
                text = f"Saves of {delay['node']} wait for {lag}"
                yield Concern("warn", "checkpoint", text, href, delay["delay_at"], f"job {job}")


def _inverted(at: str | None) -> str:
    when = moment(at)
    return "9" if when is None else f"{10**12 - when.timestamp():020.3f}"
