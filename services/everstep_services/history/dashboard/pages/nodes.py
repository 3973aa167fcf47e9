"""`/nodes`: checks by nodes, strikes, exclusions with their ends."""

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from everstep.job_states import NODE_PRESENCES
from everstep_services.history.dashboard.pages.page import Page, filters
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.rest import Reader, RestAnswer, path_of, together

_MATRIX_NODES = 40


async def listed(reader: Reader, request: Request) -> Page:
    """Nodes, those with the most strikes first, and what their last checks found."""
    given = filters(request, "job", "state", "healthy", "suspect", "excluded", "q", "cursor")
    nodes = await reader.get("nodes", limit=50, sort="strikes", order="desc", **given)
    shown = nodes["items"][:_MATRIX_NODES]
    checks = await together(
        *(reader.get_or_not(f"{path_of('nodes', node['node'])}/checks", limit=10) for node in shown)
    )
    return Page(
        "nodes.html",
        {
            "title": "Nodes",
            "live": "",
            "nodes": nodes,
            "states": NODE_PRESENCES,
            "matrix": attempt(lambda: _matrix(shown, checks)),
            "is_filtered": any(name != "cursor" for name in given),
        },
    )


async def one(reader: Reader, request: Request) -> Page:
    """A node: how it stands, what was found, what happened on it."""
    node = request.path_params["node"]
    path = path_of("nodes", node)
    detail, checks, incidents, facts = await together(
        reader.get(path),
        reader.get_or_not(f"{path}/checks", limit=20),
        reader.get_or_not("incidents", node=node, limit=20),
        reader.get_or_not("facts", node=node, order="desc", limit=20),
    )
    values = {"title": node, "live": f"node={node}", "node": detail, "checks": checks,
              "incidents": incidents, "facts": facts}  # fmt: skip
    return Page("node.html", values)


def _matrix(
    nodes: Sequence[Mapping[str, Any]], checks: Sequence[RestAnswer]
) -> Mapping[str, Any] | None:
    """The newest examination of each node, and newer probes: one cell for each check."""
    rows: list[dict[str, Any]] = []
    for node, answer in zip(nodes, checks, strict=True):
        newest = answer.data["items"] if answer.data else []
        cells: dict[str, Any] = {}
        for examination in newest:  # the newest first
            cells = {**_cells(examination), **cells}
            if examination["occasion"] != "probe":  # it has run all checks
                break
        if newest:
            rows.append({"node": node, "last": newest[0], "cells": cells})
    if not rows:
        return None
    names = sorted({name for row in rows for name in row["cells"]})
    probes = {probe["check"] for node in nodes for probe in node["probes"]}
    return {"names": names, "rows": rows, "probes": probes}


def _cells(examination: Mapping[str, Any]) -> dict[str, Any]:
    """One result for each check: one that is not ok, if there is one."""
    cells: dict[str, Any] = {}
    for result in examination["results"] or ():
        before = cells.get(result["check"])
        if before is None or before["state"] in {"pass", "passed", "ok"}:
            cells[result["check"]] = result
    return cells
