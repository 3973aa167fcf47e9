"""`/incidents`: what went wrong; one incident, its verdict first, and its evidence."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from everstep.incident_outcomes import INCIDENT_FATES
from everstep_services.history.dashboard import drawings
from everstep_services.history.dashboard.formats import moment
from everstep_services.history.dashboard.pages.page import Page, filters
from everstep_services.history.dashboard.parts import attempt
from everstep_services.history.dashboard.rest import Reader, RestAnswer, path_of, together

_TAILS = 3
_TAIL_LINES = 60
_CELLS_MOST = 128


async def listed(reader: Reader, request: Request) -> Page:
    """Incidents of all jobs, with filters in the URL."""
    given = filters(request, "job", "outcome", "trigger", "node", "open", "cursor")
    incidents = await reader.get("incidents", limit=50, **given)
    return Page(
        "incidents.html",
        {
            "title": "Incidents",
            "live": "",
            "incidents": incidents,
            "outcomes": INCIDENT_FATES,
            "is_filtered": any(name != "cursor" for name in given),
        },
    )


async def one(reader: Reader, request: Request) -> Page:
    """The whole story of one incident."""
    incident = request.path_params["incident"]
    path = path_of("incidents", incident)
    told = await reader.get(path)
    collectives, stacks, *tails = await together(
        reader.get_or_not(f"{path}/collectives"),
        reader.get_or_not(f"{path}/stacks"),
        *(_tail(reader, path, piece) for piece in _logs(told)[:_TAILS]),
    )
    return Page(
        "incident.html",
        {
            "title": f"Incident of {told['job']}",
            "live": f"job={told['job']}",
            "one": told,
            "path_of_rest": path,
            "ledger": attempt(lambda: drawings.ledger(told["ledger"])),
            "collectives": collectives,
            "matrix": attempt(lambda: _matrix(collectives)),
            "stacks": stacks,
            "folds": attempt(lambda: _folds(stacks, told["verdict"])),
            "grounds": attempt(lambda: _grounds(told["verdict"])),
            "tails": tails,
            "summary": _summary(told),
            "logs_around": _logs_around(told),
        },
    )


async def markdown(reader: Reader, request: Request) -> Page:
    """The incident for a ticket or a chat."""
    told = await reader.get(path_of("incidents", request.path_params["incident"]))
    values = {"one": told, "summary": _summary(told), "ledger": drawings.ledger(told["ledger"]),
              "grounds": _grounds(told["verdict"])}  # fmt: skip
    return Page("incident.md", values, media_type="text/markdown; charset=utf-8")


def _summary(told: Mapping[str, Any]) -> str:
    """The first sentence of the page."""
    verdict = told["verdict"]
    if told["first_report"]:
        return str(told["headline"])
    is_conclusive = verdict is not None and not verdict["is_inconclusive"]
    if is_conclusive and verdict["verdict_reason"]:
        return str(verdict["verdict_reason"])
    return str(told["headline"] or told["trigger"] or "An incident")


def _grounds(verdict: Mapping[str, Any] | None) -> Sequence[Mapping[str, Any]]:
    """The claims, the weightiest first, whether they speak for or against."""
    return sorted((verdict or {}).get("evidence") or (), key=lambda claim: -abs(claim["weight"]))


def _folds(
    stacks: RestAnswer, verdict: Mapping[str, Any] | None
) -> Sequence[tuple[Mapping[str, Any], bool]]:
    """Stacks, those of culprits first, and whether each is of a culprit."""
    if stacks.data is None:
        return ()
    odd = {suspect["rank"] for suspect in stacks.data["suspects"]}
    odd = set((verdict or {}).get("culprit_ranks") or ()) or odd
    folds = [(fold, not odd.isdisjoint(fold["ranks"])) for fold in stacks.data["stacks"]]
    return sorted(folds, key=lambda fold: not fold[1])


def _logs(told: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Pieces of evidence that are the ends of logs; those of the culprits first."""
    culprits = set((told["verdict"] or {}).get("culprit_ranks") or [told["rank"]])
    pieces = [
        piece
        for piece in told["evidence"]
        if piece["blob"] and piece["kind"] in {"stderr", "stdout", "log_tail", "log"}
    ]
    return sorted(pieces, key=lambda piece: piece["rank"] not in culprits)


def _logs_around(told: Mapping[str, Any]) -> str:
    """The question of the page with what all ranks wrote around that time."""
    at = moment(told["opened_at"])
    if at is None or told["round"] is None:
        return ""
    times = {"since": at - timedelta(seconds=60), "until": at + timedelta(seconds=10)}
    query = {name: value.isoformat() for name, value in times.items()}
    return urlencode({"round": told["round"], **query})


async def _tail(reader: Reader, path: str, piece: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = await reader.text(f"{path}/evidence/{path_of(piece['id'])}")
    lines = [] if answer.data is None else answer.data.splitlines()[-_TAIL_LINES:]
    return {**piece, "lines": lines, "problem": answer.problem}


_STATES = ("never_joined", "no_dump", "scheduled", "started", "completed")


def _matrix(answer: RestAnswer) -> Mapping[str, Any] | None:
    """Collectives by ranks: one word for each cell, and the ranks that stand out."""
    if answer.data is None:
        return None
    read = answer.data
    suspects = sorted(
        {suspect["rank"] for fault in read["faults"] for suspect in fault["suspects"]}
    )
    seen = {r for row in read["collectives"] for name in _STATES for r in row[name]}
    ranks = [*suspects, *sorted(seen - set(suspects))][:_CELLS_MOST]
    rows = [
        {"about": row, "cells": [_state(row, rank) for rank in sorted(ranks)]}
        for row in read["collectives"]
    ]
    return {
        "ranks": sorted(ranks),
        "rows": rows,
        "suspects": suspects,
        "left_out": len(seen) - len(ranks),
    }


def _state(row: Mapping[str, Any], rank: int) -> str:
    return next((name for name in _STATES if rank in row[name]), "absent")
