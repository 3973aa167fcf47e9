"""`/jobs/…/logs`: what ranks have written, from the log store, with search, by time, live."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request

from everstep.job_states import OVER
from everstep_services.history.dashboard.formats import moment
from everstep_services.history.dashboard.pages.page import Page, filters
from everstep_services.history.dashboard.rest import (
    Reader,
    RestAnswer,
    RestError,
    path_of,
    together,
)

_NARROWING = frozenset({"node", "rank", "stream", "since", "until", "find"})
_FILTERS = ("round", *sorted(_NARROWING), "regex", "from", "cursor")
_LINES = 500
_LIMIT = 1000
_PAGES_MOST = 6
_READ_WHOLE_BYTES = 2 << 20
_WINDOWS_S = (600.0, 20.0, 1.0)
_AGO = re.compile(r"([0-9]{1,6})\s*(s|m|min|h|d)")
_UNITS_S = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
_RANKS_MOST, _NODES_MOST = 256, 64
_LONG_AGO = datetime.min.replace(tzinfo=UTC)


@dataclass(slots=True)
class _Read:
    """The lines of a page, and where the next page begins."""

    lines: list[Mapping[str, Any]] = field(default_factory=list)
    round: int | None = None
    next: str = ""
    is_end: bool = True
    scanned_bytes: int = 0
    answer: RestAnswer = field(default_factory=lambda: RestAnswer(None))
    asked: dict[str, Any] = field(default_factory=dict)
    """What REST was asked for."""
    begins_at: datetime | None = None
    """Set where earlier lines were left out."""


async def listed(reader: Reader, request: Request) -> Page:
    """The last lines of the newest round, or those that the filters in the URL ask for."""
    job = request.path_params["job"]
    path = path_of("jobs", job)
    given = filters(request, *_FILTERS)
    detail, rounds = await together(reader.get(path), reader.get_live(f"{path}/logs/rounds"))
    asked, problem = _asked(given, reader.rest.now())
    stored = [] if rounds.data is None else rounds.data["rounds"]
    number = int(given["round"]) if given.get("round", "").isdecimal() else max(stored, default=0)
    index = RestAnswer(None)
    if problem:
        read = _Read(answer=RestAnswer(None, problem, 422))
    elif not stored:
        read = _Read(answer=rounds)
    else:
        index = await reader.get_or_not(f"{path}/rounds/{number}/logs")
        is_from_start = bool({"since", "until", "find", "cursor", "from"} & given.keys())
        if is_from_start:
            read = await _forward(reader, path, asked, _LINES)
        else:
            read = await _newest(reader, path, asked, index)
    is_over = detail["state"] in OVER
    return Page(
        "logs.html",
        {
            "title": f"Logs of {job}",
            "job": detail,
            "given": given,
            "rounds": stored,
            "number": number,
            "index": _summary(index.data, asked),
            "read": read,
            "search": given.get("find", "") if "regex" not in given else "",
            "is_filtered": bool(
                {"node", "rank", "stream", "since", "until", "find"} & given.keys()
            ),
            "is_stored": bool(stored),
            "is_bus_away": not stored and bool(rounds.problem),
            "link": _Links(job, given),
            "follow": "" if is_over or not read.is_end or not read.next else _live(job, read),
            **({} if stored else {"live": f"job={job}"}),
        },
    )


class _Links:
    """Links to this page with other filters."""

    def __init__(self, job: str, given: Mapping[str, str]) -> None:
        self._path = f"/{path_of('jobs', job)}/logs"
        self._given = {name: value for name, value in given.items() if name != "cursor"}

    def __call__(self, **changes: object) -> str:
        """The same view, but for these filters; None takes a filter away."""
        changed = {**self._given, **{name.rstrip("_"): value for name, value in changes.items()}}
        query = urlencode({name: value for name, value in changed.items() if value is not None})
        return f"{self._path}?{query}" if query else self._path

    def near(self, line: Mapping[str, Any]) -> str:
        """What all ranks wrote within some seconds of a line."""
        at = moment(line["at"])
        if at is None:
            return self._path
        around = {"since": at - timedelta(seconds=5), "until": at + timedelta(seconds=5)}
        times = {name: value.isoformat() for name, value in around.items()}
        return f"{self._path}?{urlencode({'round': line['round'], **times})}"


def _asked(given: Mapping[str, str], now: datetime) -> tuple[dict[str, Any], str]:
    """What to ask REST for, and the problem of a filter that cannot be read."""
    asked: dict[str, Any] = {
        name: given[name] for name in ("round", "stream", "cursor") if name in given
    }
    for name in ("since", "until"):
        if name in given:
            asked[name] = _time(given[name], now)
    if "find" in given:
        asked["regex" if "regex" in given else "contains"] = given["find"]
    if "node" in given:
        asked["node"] = tuple(given["node"].replace(",", " ").split()[:_NODES_MOST])
    ranks = _ranks(given.get("rank", ""))
    if ranks is None:
        problem = f"{given['rank']!r} names no ranks: write them as 3, 8-11 (at most {_RANKS_MOST})"
        return asked, problem
    if ranks:
        asked["rank"] = ranks
    return asked, ""


def _ranks(text: str) -> tuple[int, ...] | None:
    """`0, 8-11` as numbers; None where that is not what the text is."""
    ranks: list[int] = []
    for part in text.replace("–", "-").replace(",", " ").split():
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal() and len(first) < 9 and len(last) < 9):
            return None
        if not 0 <= int(last) - int(first) < _RANKS_MOST:
            return None
        ranks += range(int(first), int(last) + 1)
    return tuple(ranks) if len(ranks) <= _RANKS_MOST else None


def _time(text: str, now: datetime) -> str:
    """A time of a URL, or how long ago it was, as REST takes it."""
    ago = _AGO.fullmatch(text.strip().removesuffix("ago").strip())
    if ago is None:
        return text
    try:
        return (now - timedelta(seconds=int(ago[1]) * _UNITS_S[ago[2]])).isoformat()
    except OverflowError:
        return text  # REST refuses it


async def _forward(reader: Reader, path: str, asked: Mapping[str, Any], most: int) -> _Read:
    """Lines from a place on, up to a number; a search looks through a few pages of REST."""
    read = _Read(asked=dict(asked))
    for _ in range(_PAGES_MOST):
        limit = min(_LIMIT, most - len(read.lines))
        if not await _one_more(reader, path, read, limit):
            break
        if read.is_end or len(read.lines) >= most:
            break
    read.lines = _merged(read.lines)
    return read


async def _newest(reader: Reader, path: str, asked: Mapping[str, Any], index: RestAnswer) -> _Read:
    """The last lines: REST reads forward only, so from a time shortly before the end."""
    files = _files(index.data, asked)
    ends = [at for file in files if (at := moment(file["last_at"])) is not None]
    size = sum(file["stored_bytes"] for file in files)
    windows = _WINDOWS_S if ends and size > _READ_WHOLE_BYTES else (0.0,)
    read = _Read()
    for window_s in windows:
        read = _Read(asked=dict(asked))
        if window_s:
            read.begins_at = max(ends) - timedelta(seconds=window_s)
            read.asked["since"] = read.begins_at.isoformat()
        await _to_end(reader, path, read)
        if read.is_end:
            break
    lines = _merged(read.lines)
    if len(lines) > _LINES:
        lines = lines[-_LINES:]
        read.begins_at = moment(lines[0]["at"])
    read.lines = lines
    return read


async def _to_end(reader: Reader, path: str, read: _Read) -> None:
    for _ in range(_PAGES_MOST):
        if not await _one_more(reader, path, read, 5 * _LIMIT) or read.is_end:
            return


async def _one_more(reader: Reader, path: str, read: _Read, limit: int) -> bool:
    """Read a page of REST; False where there is a problem instead."""
    try:
        data = await reader.get(f"{path}/logs", limit=limit, **read.asked)
    except RestError as error:
        if error.status == 401:
            raise
        read.answer, read.is_end = RestAnswer(None, error.detail, error.status), True
        return False
    read.lines += data["items"]
    read.round, read.next, read.is_end = data["round"], data["next"], data["is_end"]
    read.scanned_bytes += data["scanned_bytes"]
    read.asked["cursor"] = data["next"]
    return True


def _merged(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Sorted by time over the pages; lines of one stream stay in order."""
    newest: dict[tuple[object, ...], datetime] = {}
    keyed: list[tuple[datetime, Mapping[str, Any]]] = []
    for line in lines:
        key = (line["round"], line["node"], line["rank"], line["stream"])
        newest[key] = max(newest.get(key, _LONG_AGO), moment(line["at"]) or _LONG_AGO)
        keyed.append((newest[key], line))
    keyed.sort(key=lambda pair: pair[0])
    return [line for _, line in keyed]


def _files(index: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The files of the index that the filters choose."""
    if index is None:
        return []
    return [
        file
        for file in index["items"]
        if file["rank"] in asked.get("rank", (file["rank"],))
        and file["node"] in asked.get("node", (file["node"],))
        and file["stream"] == asked.get("stream", file["stream"])
    ]


def _summary(index: Mapping[str, Any] | None, asked: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How much of the output is in the store."""
    if index is None:
        return None
    files = _files(index, asked)
    return {
        "nodes": sorted({file["node"] for file in files}),
        "ranks": sorted({file["rank"] for file in files}),
        "bytes": sum(file["stored_bytes"] for file in files),
        "missing_bytes": sum(max(0, file["bytes"] - file["stored_bytes"]) for file in files),
        "lost_bytes": sum(file["lost_bytes"] for file in files),
        "is_whole": all(file["is_whole"] for file in files),
    }


def _live(job: str, read: _Read) -> str:
    """Where the lines come from that are written from now on."""
    query = urlencode({**read.asked, "cursor": read.next}, doseq=True)
    return f"/{path_of('jobs', job)}/logs/live?{query}"
