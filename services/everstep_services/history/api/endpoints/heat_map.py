"""`/jobs/{job}/heat-map`: all ranks by windows, one byte a cell, for pictures."""

import asyncio
import base64
import gzip
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Header, Query, Response
from numpy.typing import NDArray
from pydantic import Field
from sqlalchemy import select

from everstep.messages import HeatMapDrawn, HeatMapPart, NodeRun, ShowHeatMap
from everstep.messages.codec import fact_in
from everstep.store import tables
from everstep.store.queries import SortOrder, page, slow_ranks
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.endpoints.stragglers import (
    Measure,
    ask_straggler,
    measure_of,
    steps_before,
)
from everstep_services.history.api.http.parameters import LITERAL, TEXT, JobName, RequestModel
from everstep_services.history.api.http.problems import ProblemError, responses

router = APIRouter(tags=["slow ranks"])

_RANKS_MOST = 131_072
_CELL_MOST = 65_534
"""Of a cell of straggler, less one: 0 is not known."""
_SHOWN = 0.95
"""The slowest one in twenty would hide all differences between the others."""
_LEAST_SPREAD = 0.2
"""Of the median. Where ranks differ by less, the picture is calm."""
_FOUND_MOST = 100
_PARTS_MOST = 128


class HeatMapWanted(RequestModel):
    """The measure and the windows of the picture."""

    measure: Measure | None = None
    """The measure; by default `own`, or `section` if a section is named."""
    section: str = Field("", max_length=256, pattern=TEXT)
    """The section to show the time of."""
    most_windows: Annotated[int, Field(ge=1, le=1000), LITERAL] = 100
    """The number of windows; the latest are shown."""


@router.get(
    "/jobs/{job}/heat-map",
    summary="Ranks by windows, as bytes",
    response_class=Response,
    responses={
        **responses(404),
        200: {
            "description": "Four bytes: the length of a header, little-endian. The header, in "
            "JSON: `ranks`, `nodes` (name and number of ranks, in order), `windows` (first and "
            "last step), `found` (ranks that were found to be slow in this round, and the state of "
            "each finding), `low`, `high`, `measure`, `sections`, `is_by_time`. Then a byte a "
            "cell, rank by rank: 0 is unknown, 1 to 255 go from `low` to `high`.",
            "content": {
                "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
            },
        },
    },
)
async def get_heat_map(
    context: Ctx,
    _token: Reader,
    job: JobName,
    asked: Annotated[HeatMapWanted, Query()],
    accept_encoding: Annotated[str, Header(max_length=256, include_in_schema=False)] = "",
) -> Response:
    """The same as `timings`, for all ranks at once, in a hundredth of the bytes."""
    await check_known(context, job)
    is_recorded = measure_of(asked.measure, asked.section) == "own"
    try:
        parts = await _parts(context, job, asked)
        if is_recorded and not parts[-1].windows:  # it has restarted since
            parts = await _recorded(context, job) or parts
    except ProblemError:  # straggler is away, or has forgotten the job
        parts = await _recorded(context, job)
        if not parts or not is_recorded:
            raise
    is_packed = "gzip" in accept_encoding
    round_, is_by_time = parts[-1].round, parts[-1].is_by_time
    before = 0 if is_by_time else await steps_before(context, job, round_)
    newest = SortOrder((tables.stragglers.c.n,), is_descending=True)
    of_round = slow_ranks(job).where(tables.stragglers.c.round == round_)
    findings = await page(context.database, of_round, newest, None, _FOUND_MOST)
    more = {
        "windows": [(first + before, last + before) for first, last in parts[-1].windows],
        "found": [(row["rank"], row["state"]) for row in findings.rows],
    }
    body = await asyncio.to_thread(_body, parts, more, is_packed=is_packed)
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if is_packed else {})
    return Response(body, 200, headers, "application/octet-stream")


async def _parts(context: Context, job: str, asked: HeatMapWanted) -> Sequence[HeatMapPart]:
    """Parts with the same windows: a window may begin between two questions."""
    measure = measure_of(asked.measure, asked.section)
    parts: list[HeatMapPart] = []
    first: int | None = 0
    while first is not None and first < _RANKS_MOST:
        question = ShowHeatMap(
            job=job, measure=measure, section=asked.section, first_rank=first,
            most_windows=asked.most_windows,
        )  # fmt: skip
        part = await ask_straggler(context, "heat_map", question, HeatMapPart)
        parts.append(part)
        after = part.next_rank
        first = after if after is not None and after > first else None
    newest = parts[-1].windows
    return [part for part in parts if part.windows == newest]


async def _recorded(context: Context, job: str) -> Sequence[HeatMapPart]:
    """The picture that straggler has recorded at the last end of the job."""
    facts = tables.facts.c
    query = select(facts.body).where(facts.job == job, facts.kind == "heat_map_drawn")
    async with context.database.read() as connection:
        bodies = (await connection.scalars(query.order_by(facts.n.desc()).limit(_PARTS_MOST))).all()
    drawn = (fact for body in bodies if isinstance(fact := fact_in(body), HeatMapDrawn))
    sound = [part for part in map(_part_of, drawn) if _is_sound(part)]
    parts = [
        part for part in sound if (part.round, part.windows) == (sound[0].round, sound[0].windows)
    ]
    return sorted(parts, key=lambda part: part.first_rank)


def _part_of(fact: HeatMapDrawn) -> HeatMapPart:
    return HeatMapPart(
        round=fact.round, measure="own", windows=fact.windows, first_rank=fact.first_rank,
        nodes=tuple(NodeRun(node=node, ranks=ranks) for node, ranks in fact.nodes),
        low=fact.low, high=fact.high, cells=fact.cells, is_by_time=fact.is_by_time,
    )  # fmt: skip


def _is_sound(part: HeatMapPart) -> bool:
    """Whether there is a cell for each rank and window: any job may send such a fact."""
    try:
        cells = base64.b64decode(part.cells, validate=True)
    except ValueError:
        return False
    return len(cells) == 2 * len(part.windows) * sum(run.ranks for run in part.nodes) > 0


def _body(
    parts: Sequence[HeatMapPart], more: Mapping[str, Sequence[Any]], *, is_packed: bool
) -> bytes:
    values = np.concatenate([_values(part) for part in parts])
    is_known = ~np.isnan(values).all(axis=0)
    if is_known.any():  # a window without a value would be an empty stripe
        values = values[:, is_known]
        windows = zip(more["windows"], is_known, strict=True)
        more = {**more, "windows": [window for window, kept in windows if kept]}
    low, high = colour_scale(values)
    scale = 254 / (high - low) if high > low else 0.0
    cells = np.nan_to_num(np.clip((values - low) * scale, 0, 254) + 1, nan=0).astype(np.uint8)
    header = msgspec.json.encode(
        {
            "ranks": [
                part.first_rank + i
                for part in parts
                for i in range(sum(run.ranks for run in part.nodes))
            ],
            "nodes": _joined(parts),
            **more,
            "low": low,
            "high": high,
            "measure": parts[-1].measure,
            "sections": parts[-1].sections,
            "is_by_time": parts[-1].is_by_time,
        }
    )
    body = struct.pack("<I", len(header)) + header + cells.tobytes()
    return gzip.compress(body, 1, mtime=0) if is_packed else body


def colour_scale(values: NDArray[np.float64]) -> tuple[float, float]:
    """What the first and the last colour stand for: around the median, as far as ranks differ.

    Ranks are compared within a window, and windows by their median: neither one rank nor a window
    in which all were slow (the first one, an evaluation) presses the others into one colour.
    """
    heard = values[:, ~np.isnan(values).all(axis=0)]
    if not heard.size:
        return 0.0, 1.0
    middle = float(np.nanmedian(heard))
    apart = np.nanquantile(np.abs(heard - np.nanmedian(heard, axis=0)), _SHOWN, axis=0)
    least = _LEAST_SPREAD * abs(middle)
    spread = max(float(np.median(apart)), least)
    low = min(max(float(np.nanmin(heard)), middle - spread), middle - least)
    return low, max(min(float(np.nanmax(heard)), middle + spread), middle + least)


def _values(part: HeatMapPart) -> NDArray[np.float64]:
    """Ranks by windows; NaN where nothing is known."""
    placed = np.frombuffer(base64.b64decode(part.cells), dtype="<u2").astype(np.float64)
    placed = placed.reshape(-1, max(1, len(part.windows)))
    placed[placed == 0] = np.nan
    values: NDArray[np.float64] = part.low + (placed - 1) * (part.high - part.low) / _CELL_MOST
    return values


def _joined(parts: Sequence[HeatMapPart]) -> list[tuple[str, int]]:
    """The nodes of all parts, each with its ranks; one may go on in the next part."""
    joined: list[tuple[str, int]] = []
    for run in (run for part in parts for run in part.nodes):
        if joined and joined[-1][0] == run.node:
            joined[-1] = (run.node, joined[-1][1] + run.ranks)
        else:
            joined.append((run.node, run.ranks))
    return joined
