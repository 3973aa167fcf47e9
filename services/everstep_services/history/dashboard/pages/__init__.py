"""The pages, by their paths."""

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request

from everstep_services.history.dashboard.pages import (
    checkpoints,
    control,
    facts,
    fleet,
    incidents,
    jobs,
    logs,
    nodes,
    ranks,
    runbooks,
)
from everstep_services.history.dashboard.pages.page import Page
from everstep_services.history.dashboard.rest import Reader

__all__ = ["PAGES", "Page", "incidents"]

PAGES: Mapping[str, Callable[[Reader, Request], Awaitable[Page]]] = {
    "/": fleet.fleet,
    "/jobs": jobs.listed,
    "/jobs/{job}": jobs.one,
    "/jobs/{job}/ranks": ranks.ranks,
    "/jobs/{job}/logs": logs.listed,
    "/jobs/{job}/stragglers": ranks.stragglers,
    "/jobs/{job}/checkpoints": checkpoints.overview,
    "/jobs/{job}/checkpoints/holders": checkpoints.holders,
    "/incidents": incidents.listed,
    "/incidents/{incident}": incidents.one,
    "/nodes": nodes.listed,
    "/nodes/{node}": nodes.one,
    "/facts": facts.listed,
    "/facts/{fact}": facts.one,
    "/control": control.overview,
    "/runbooks/{name}": runbooks.one,
}
