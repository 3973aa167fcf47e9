"""`/jobs`: a list with filters, and one job with the picture of its rounds."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from everstep.job_states import JOB_STATES, OVER, WITH_RANKS
from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.formats import moment
from everstep_services.history.dashboard.pages.page import Page, filters, without_cursor
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.progress import eta, reported_values, step_times
from everstep_services.history.dashboard.rest import Reader, RestAnswer, path_of, together

_ROUNDS = 200
_POINTS = 500
_PARTS = 600
_FINDINGS = 50
_MARKS = drawings.MARKS_MOST  # a commit of many ranks is a large fact


async def listed(reader: Reader, request: Request) -> Page:
    """Jobs, with filters in the URL."""
    given = filters(request, "state", "user", "label", "q", "sort", "cursor")
    jobs = await reader.get("jobs", limit=50, **given)
    return Page(
        "jobs.html",
        {
            "title": "Jobs",
            "live": "",
            "jobs": jobs,
            "states": JOB_STATES,
            "query_without_cursor": without_cursor(request),
            "is_filtered": any(name in given for name in ("state", "user", "label", "q")),
        },
    )


async def one(reader: Reader, request: Request) -> Page:
    """A job: where its time went, how fast it steps, what went wrong."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    facts = {"job": job, "order": "desc", "limit": _POINTS}
    (
        detail,
        goodput,
        parts,
        rounds,
        incidents,
        decisions,
        saves,
        commits,
        progress,
        slow,
        found,
    ) = await together(
        reader.get(path),
        reader.get_or_not(f"{path}/goodput"),
        reader.get_or_not(f"{path}/timeline", most=_PARTS),
        reader.get_or_not(f"{path}/rounds", limit=_ROUNDS),
        reader.get_or_not(f"{path}/incidents", limit=20),
        reader.get_or_not(f"{path}/actions", limit=20),
        reader.get_or_not(f"{path}/saves"),
        reader.get_or_not("facts", kind="checkpoint_committed", **{**facts, "limit": _MARKS}),
        reader.get_or_not("facts", kind="progress_made", **facts),
        reader.get_or_not(f"{path}/stragglers", state="open", limit=5),
        reader.get_or_not(f"{path}/stragglers", limit=_FINDINGS),
    )
    told = _items(rounds)
    saved = [fact["body"] for fact in _items(commits)]
    reports = [fact["body"] for fact in _items(progress)]
    steps = attempt(lambda: step_times(reports))
    return Page(
        "job.html",
        {
            "title": job,
            "live": f"job={job}",
            "job": detail,
            "rounds": rounds,
            "told": told,
            "timeline": attempt(
                lambda: drawings.timeline(_items(parts), _items(incidents), saved, _items(found))
            ),
            "parts_read": parts,
            "goodput": goodput,
            "shares": attempt(
                lambda: drawings.shares(goodput.data["seconds"] if goodput.data else None)
            ),
            "steps": steps,
            "values": attempt(lambda: reported_values(reports)),
            "eta": attempt(lambda: eta(detail, steps, reader.rest.now())),
            "incidents": incidents,
            "decisions": decisions,
            "saves": saves,
            "slow": _items(slow),
            "waits": told[0]["waiting_reason"] if told and detail["state"] == "forming" else "",
            "has_ranks": detail["state"] in WITH_RANKS,
            "is_over": moment(detail["ended_at"]) is not None and detail["state"] in OVER,
        },
    )


def _items(answer: RestAnswer) -> Sequence[Mapping[str, Any]]:
    items: Sequence[Mapping[str, Any]] = () if answer.data is None else answer.data["items"]
    return items
