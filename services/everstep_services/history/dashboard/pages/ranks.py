"""`/jobs/…/ranks` and `/stragglers`: how ranks are now, and which of them are slow."""

from starlette.requests import Request

from everstep.job_states import AT_WORK
from everstep_services.history.dashboard.pages.page import Page, filters, whole
from everstep_services.history.dashboard.rest import Reader, path_of, together

MEASURES = {
    "own": "its own time in a step",
    "ratio": "its own time against its group",
    "waited": "time waited for others",
    "step": "time of the whole step",
    "cpu": "processor time",
    "runnable": "time ready to run, not running",
    "round_trip": "round trips over the network",
}


async def ranks(reader: Reader, request: Request) -> Page:
    """Where each rank is, and a heat map of where the time went."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    given = filters(request, "state", "node", "cursor")
    measure = request.query_params.get("measure", "own")
    section = request.query_params.get("section", "")
    asked = {"measure": "section", "section": section} if section else {"measure": measure}
    detail, now, some, round_ = await together(
        reader.get(path),
        reader.get_or_not(f"{path}/ranks", limit=40, **given),
        reader.get_or_not(f"{path}/timings", most_ranks=1, most_windows=1, **asked),
        _selected(reader, request, path),
    )
    return Page(
        "ranks.html",
        {
            "title": f"Ranks of {job}",
            "live": f"job={job}",
            "job": detail,
            "is_at_work": detail["state"] in AT_WORK,
            "ranks": now,
            "timings": some,
            "measure": measure,
            "section": section,
            "measures": MEASURES,
            "selected": round_,
        },
    )


async def _selected(reader: Reader, request: Request, path: str) -> object:
    """The rank that the URL names, with the end of its log."""
    text = request.query_params.get("rank")
    if text is None:
        return None
    rank = whole(text, 0, 10**7)
    detail = await reader.get(path)
    number = detail["round"] or 0
    timings, log, slow = await together(
        reader.get_or_not(f"{path}/timings", first_rank=rank, most_ranks=1, most_windows=60),
        reader.text(f"{path}/rounds/{number}/ranks/{rank}/log"),
        reader.get_or_not(f"{path}/stragglers", rank=rank, limit=10),
    )
    lines = [] if log.data is None else log.data.splitlines()[-40:]
    return {"rank": rank, "timings": timings, "lines": lines, "no_log": log.problem, "slow": slow}


async def stragglers(reader: Reader, request: Request) -> Page:
    """Who is late, why, and what it costs."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    given = filters(request, "state", "cause", "node", "rank", "cursor")
    detail, episodes, now, shifts = await together(
        reader.get(path),
        reader.get(f"{path}/stragglers", limit=50, **given),
        reader.get_live(f"{path}/stragglers/now", most=30),
        reader.get_or_not(f"{path}/step-shifts", limit=20),
    )
    return Page(
        "stragglers.html",
        {
            "title": f"Stragglers of {job}",
            "live": f"job={job}",
            "job": detail,
            "found": episodes,
            "now_": now,
            "shifts": shifts,
        },
    )
