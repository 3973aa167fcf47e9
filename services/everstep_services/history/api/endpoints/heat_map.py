"""`/jobs/{job}/heat-map`: all ranks by windows, one byte a cell, for pictures."""

import asyncio
import gzip
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from fastapi import APIRouter, Header, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from everstep.messages import ShowTimings, TimingTable
from everstep_services.history.api.context import Context, Ctx, Reader
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.endpoints.stragglers import Measure, ask_straggler, measure_of
from everstep_services.history.api.http.parameters import LITERAL, TEXT, JobName
from everstep_services.history.api.http.problems import responses

router = APIRouter(tags=["slow ranks"])

_RANKS_AT_ONCE = 4096
_RANKS_MOST = 131_072
_SHOWN = 0.998
"""The slowest one in five hundred would hide all differences between the others."""


class HeatMapWanted(BaseModel):
    """The measure and the windows of the picture."""

    model_config = ConfigDict(extra="forbid")

    measure: Measure | None = Field(
        None, description="`own` if not given, or `section` where one is named."
    )
    section: str = Field("", max_length=256, pattern=TEXT, description="Which section.")
    most_windows: Annotated[int, Field(ge=1, le=1000), LITERAL] = Field(
        100, description="How many of the latest windows."
    )


@router.get(
    "/jobs/{job}/heat-map",
    summary="Ranks by windows, as bytes",
    response_class=Response,
    responses={
        **responses(404),
        200: {
            "description": "Four bytes: the length of a header, little-endian. The header, in "
            "JSON: `ranks`, `nodes` (name and number of ranks, in order), `windows` (first and "
            "last step), `low`, `high`, `measure`, `sections`, `is_by_time`. Then a byte a cell, "
            "rank by rank: 0 is unknown, 1 to 255 go from `low` to `high`.",
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
    """The same as `timings`, of all ranks at once, in a hundredth of the bytes."""
    await check_known(context, job)
    tables = await _tables(context, job, asked)
    is_packed = "gzip" in accept_encoding
    body = await asyncio.to_thread(_body, tables, is_packed=is_packed)
    headers = {"Vary": "Accept-Encoding"} | ({"Content-Encoding": "gzip"} if is_packed else {})
    return Response(body, 200, headers, "application/octet-stream")


async def _tables(context: Context, job: str, asked: HeatMapWanted) -> Sequence[TimingTable]:
    measure = measure_of(asked.measure, asked.section)
    tables: list[TimingTable] = []
    first: int | None = 0
    while first is not None and first < _RANKS_MOST:
        question = ShowTimings(
            job=job, measure=measure, section=asked.section, first_rank=first,
            most_ranks=_RANKS_AT_ONCE, most_windows=asked.most_windows,
        )  # fmt: skip
        table = await ask_straggler(context, "timings", question, TimingTable)
        tables.append(table)
        after = table.next_rank
        first = after if after is not None and after > first else None
    return tables


def _body(tables: Sequence[TimingTable], *, is_packed: bool) -> bytes:
    newest = tables[-1].windows  # windows may begin between two questions
    rows = [row for table in tables if len(table.windows) == len(newest) for row in table.rows]
    values = np.array([row.values for row in rows], dtype=np.float64)  # None becomes NaN
    values = values.reshape(len(rows), len(newest))
    finite = values[~np.isnan(values)]
    low, high = (
        (float(finite.min()), float(np.quantile(finite, _SHOWN))) if finite.size else (0.0, 1.0)
    )
    scale = 254 / (high - low) if high > low else 0.0
    cells = np.nan_to_num(np.clip((values - low) * scale, 0, 254) + 1, nan=0).astype(np.uint8)
    header = msgspec.json.encode(
        {
            "ranks": [row.rank for row in rows],
            "nodes": _runs([row.node for row in rows]),
            "windows": newest,
            "low": low,
            "high": high,
            "measure": tables[-1].measure,
            "sections": tables[-1].sections,
            "is_by_time": tables[-1].is_by_time,
        }
    )
    body = struct.pack("<I", len(header)) + header + cells.tobytes()
    return gzip.compress(body, 1, mtime=0) if is_packed else body


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    """Equal names in a row, as name and number."""
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs
