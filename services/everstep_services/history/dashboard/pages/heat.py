"""The matrix behind the heat map of ranks: compact, so that 16 384 ranks travel and paint fast."""

import asyncio
import gzip
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from everstep_services.history.dashboard.pages.page import whole
from everstep_services.history.dashboard.rest import Reader, path_of

_PAGE = 4096
_RANKS_MOST = 65_536
_WINDOWS_MOST = 100


async def matrix(reader: Reader, request: Request) -> Response:
    """Ranks by windows as bytes.

    The first four bytes are the length (little-endian) of a JSON header; then comes one byte for
    each cell, rank by rank: 0 is unknown, 1 to 255 go from the header's `low_s` to its `high_s`.
    """
    path = f"{path_of('jobs', request.path_params['job'])}/timings"
    asked: dict[str, Any] = {"measure": request.query_params.get("measure", "own")}
    if section := request.query_params.get("section", ""):
        asked = {"measure": "section", "section": section}
    windows = whole(request.query_params.get("windows"), 60, _WINDOWS_MOST)
    pages: list[Mapping[str, Any]] = []
    first: int | None = 0
    while first is not None and first < _RANKS_MOST:
        page = await reader.get(
            path, first_rank=first, most_ranks=_PAGE, most_windows=windows, **asked
        )
        pages.append(page)
        after = page["next_rank"]
        first = after if after is not None and after > first else None
    packed = await asyncio.to_thread(_packed, pages)
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding", "Cache-Control": "no-store"}
    return Response(packed, 200, headers, "application/octet-stream")


def _packed(pages: Sequence[Mapping[str, Any]]) -> bytes:
    rows = [row for page in pages for row in page["rows"]]
    columns = max((len(page["windows"]) for page in pages), default=0)
    windows = next((p["windows"] for p in pages if len(p["windows"]) == columns), [])
    known = sorted(v for row in rows for v in row["values"] if v is not None)
    low = known[0] if known else 0.0
    # The slowest one in five hundred would hide all differences between the others.
    high = known[min(len(known) - 1, int(len(known) * 0.998))] if known else 1.0
    scale = 254 / (high - low) if high > low else 0.0
    cells = array("B", bytes(len(rows) * columns))
    for index, row in enumerate(rows):
        start = index * columns
        for column, value in enumerate(row["values"][:columns]):
            if value is not None:
                cells[start + column] = 1 + min(254, max(0, int((value - low) * scale)))
    header = msgspec.json.encode(
        {
            "ranks": [row["rank"] for row in rows],
            "nodes": _runs([row["node"] for row in rows]),
            "windows": [[one["first_step"], one["last_step"]] for one in windows],
            "low_s": low,
            "high_s": high,
            "measure": pages[0]["measure"] if pages else "",
            "is_by_time": bool(pages and pages[0]["is_by_time"]),
        }
    )
    return gzip.compress(struct.pack("<I", len(header)) + header + cells.tobytes(), 4, mtime=0)


def _runs(names: Sequence[str]) -> list[tuple[str, int]]:
    """Equal names in a row, as name and length."""
    runs: list[tuple[str, int]] = []
    for name in names:
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + 1)
        else:
            runs.append((name, 1))
    return runs
