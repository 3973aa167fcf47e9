"""Lines from the log store: of all nodes, by time, searched where they are."""

import heapq
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from everstep_services.cli.api.client import Api, job_path
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.output import say
from everstep_services.cli.pages.rank_logs import LogLine, LogSelection

_PAGE_LINES = 5000
_LOOK_EVERY_S = 1.0
_SORTED_LINES = 20_000
"""This number of lines is sorted by time at once: what a node sent late is in its place."""


@dataclass(frozen=True, slots=True)
class LineSearch:
    """Which lines of those that were selected."""

    contains: str | None = None
    regex: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def needs_store(self) -> bool:
        """Files on a node have no times, and are not searched for expressions."""
        return self != LineSearch(contains=self.contains)


def stored_round(api: Api, wanted: LogSelection) -> int | None:
    """The round in the store that is meant; None when nothing of it is there."""
    rounds: list[int] = api.get(f"{job_path(wanted.job)}/logs/rounds")["rounds"]
    if wanted.round is None:
        return max(rounds, default=None)
    return wanted.round if wanted.round in rounds else None


def stored_lines(
    api: Api, wanted: LogSelection, search: LineSearch, *, is_live: bool = False
) -> Iterator[LogLine]:
    """The lines of a round by time; live, also those that are written from now on, for ever."""
    if len(wanted.ranks) > 256:
        raise CliError(f"{len(wanted.ranks)} ranks are too many: name at most 256", Exit.USAGE)
    lines = _lines(api, wanted, search, is_live=is_live)
    if is_live:
        yield from lines
        return
    ordered = _by_time(lines)
    yield from ordered if wanted.last is None else deque(ordered, maxlen=wanted.last)


def write_cycle_file(api: Api, wanted: LogSelection, search: LineSearch, path: Path) -> int:
    """Write a round's output as NVRx's file of a cycle; how many bytes it has."""
    params, size = _params(wanted, search), 0
    del params["round"]
    place = f"{job_path(wanted.job)}/rounds/{wanted.round}/logs/text"
    try:
        with path.open("w", encoding="utf-8", newline="\n") as file:
            cursor: str | None = None
            while True:
                text, cursor = api.text_page(place, {**params, "cursor": cursor})
                size += len(text.encode())
                file.write(text)
                if cursor is None:
                    return size
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror}", Exit.USAGE) from error


def _lines(
    api: Api, wanted: LogSelection, search: LineSearch, *, is_live: bool
) -> Iterator[LogLine]:
    params, cursor, is_away = _params(wanted, search), None, False
    while True:
        try:
            page = api.get(f"{job_path(wanted.job)}/logs", {**params, "cursor": cursor})
        except CliError as error:
            if not is_live or cursor is None or error.code is not Exit.UNREACHABLE:
                raise
            if not is_away:
                say(f"the log store cannot be asked now: {error}; going on when it can")
            is_away = True
            time.sleep(_LOOK_EVERY_S)
            continue
        is_away, cursor = False, page["next"]
        for item in page["items"]:
            yield LogLine(
                item["round"], item["node"], item["rank"], item["stream"], item["text"], item["at"]
            )
        if page["is_end"]:
            if not is_live:
                return
            time.sleep(_LOOK_EVERY_S)


def _params(wanted: LogSelection, search: LineSearch) -> dict[str, Any]:
    return {
        "round": wanted.round,
        "rank": [str(rank) for rank in wanted.ranks],
        "node": None if wanted.node is None else [wanted.node],
        "stream": wanted.streams[0] if len(wanted.streams) == 1 else None,
        "contains": search.contains,
        "regex": search.regex,
        "since": None if search.since is None else search.since.isoformat(),
        "until": None if search.until is None else search.until.isoformat(),
        "limit": _PAGE_LINES,
    }


@dataclass(order=True, slots=True)
class _Waiting:
    at: datetime
    number: int
    line: LogLine = field(compare=False)


def _by_time(lines: Iterable[LogLine]) -> Iterator[LogLine]:
    """Sorted by time within some thousand lines; each stream of a rank stays in its order."""
    newest: dict[tuple[str, int, str], datetime] = {}
    heap: list[_Waiting] = []
    first = datetime.fromisoformat("1970-01-01T00:00:00+00:00")
    for number, line in enumerate(lines):
        key = (line.node, line.rank, line.stream)
        at = first if line.at is None else datetime.fromisoformat(line.at)
        newest[key] = at = max(newest.get(key, first), at)
        heapq.heappush(heap, _Waiting(at, number, line))
        if len(heap) > _SORTED_LINES:
            yield heapq.heappop(heap).line
    while heap:
        yield heapq.heappop(heap).line
