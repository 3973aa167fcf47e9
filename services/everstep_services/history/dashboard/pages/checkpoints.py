"""`/jobs/…/checkpoints`: steps by tiers, who holds what, and how many losses it survives."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from everstep_services.history.dashboard.pages.page import Page, whole
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.rest import Reader, path_of, together

TIERS = ("memory", "peer", "global")


async def overview(reader: Reader, request: Request) -> Page:
    """What can be restored, and how saving goes."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    detail, index, saves = await together(
        reader.get(path),
        reader.get_or_not(f"{path}/checkpoints", limit=200),
        reader.get_or_not(f"{path}/saves"),
    )
    items = [] if index.data is None else index.data["items"]
    return Page(
        "checkpoints.html",
        {
            "title": f"Checkpoints of {job}",
            "live": f"job={job}",
            "job": detail,
            "found": index,
            "saves": saves,
            "tiers": TIERS,
            "steps": attempt(lambda: _by_step(items)),
            **_newest(items),
        },
    )


async def holders(reader: Reader, request: Request) -> Page:
    """Who holds which part of one checkpoint."""
    job, step = request.path_params["job"], whole(request.query_params.get("step"), 0, 2**53 - 1)
    tier = request.query_params.get("tier", "")
    path = path_of("jobs", job)
    detail, checkpoint = await together(
        reader.get(path), reader.get(f"{path}/checkpoints/{step}", tier=tier)
    )
    values = {"title": f"Step {step} of {job}", "job": detail, "one": checkpoint}
    return Page("holders.html", values)


def _by_step(items: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for item in items:
        row = rows.setdefault(item["step"], {"step": item["step"], "tiers": {}, "at": None})
        row["tiers"][item["tier"]] = item
        row["at"] = row["at"] or item["saved_at"]
    return sorted(rows.values(), key=lambda row: -int(row["step"]))


def _newest(items: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The newest good step, the tiers that have it, and the losses that the best one survives."""
    good = [item for item in items if _is_good(item)]
    step = max((item["step"] for item in good), default=None)
    here = [item for item in good if item["step"] == step]
    losses = [item["survivable_losses"] for item in here if item["survivable_losses"] is not None]
    return {
        "newest": here[0] if here else None,
        "newest_tiers": ", ".join(item["tier"] for item in here),
        "survives": max(losses, default=None),
    }


def _is_good(item: Mapping[str, Any]) -> bool:
    return not (item["is_quarantined"] or item["is_missing"])
