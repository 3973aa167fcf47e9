"""What vanishes together with a rank's process, collected before it is stopped."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep_services.agent.ranks.keeping import RankSeen
from trainer_sdk.page import BadPageError, PageReading, PageView

_FILES = ("status", "wchan", "stack", "io", "stat")
"""None of them waits for the process; `cmdline`, `environ` and `maps` may, and are left alone."""
_FILE_BYTES = 8192
_NAMED_MOST = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What a collector has to say about the ranks of this node."""

    content: bytes
    summary: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one collector, or why nothing did."""

    evidence: str
    """As in `evidence_collected`."""
    content: bytes = b""
    summary: str = ""
    missing: str = ""
    took_s: float = 0.0


Collector = Callable[[Sequence[RankSeen], Clock], Awaitable[Found | None]]
"""Asks nothing of the ranks that could change them; None when there is nothing to say."""


async def collect(
    collectors: Mapping[str, Collector], ranks: Sequence[RankSeen], within_s: float, clock: Clock
) -> list[Piece]:
    """All of them, beside each other; what is not there in time is missing."""
    found = await asyncio.gather(
        *(_piece(name, one(ranks, clock), within_s, clock) for name, one in collectors.items())
    )
    return [piece for piece in found if piece is not None]


async def _piece(
    evidence: str, collecting: Awaitable[Found | None], within_s: float, clock: Clock
) -> Piece | None:
    began = clock.now()
    try:
        async with asyncio.timeout(within_s):
            found = await collecting
    except TimeoutError:
        return Piece(evidence, missing=f"not there after {within_s:g} s", took_s=within_s)
    except Exception as error:  # noqa: BLE001  whatever a collector does, the ranks are stopped
        why = f"{type(error).__name__}: {error}"
        return Piece(evidence, missing=why, took_s=clock.now() - began)
    if found is None:
        return None
    return Piece(evidence, found.content, found.summary, took_s=clock.now() - began)


async def pages(ranks: Sequence[RankSeen], clock: Clock) -> Found | None:
    """How far each rank was, by its own page; also of those that are gone."""
    now = clock.now()
    read = {one.rank: _page(one.page) for one in ranks}
    known = {rank: said for rank, said in read.items() if said}
    if not known:
        return None
    said = (f"rank {rank}: {_reached(one, now)}" for rank, one in known.items())
    return Found(msgspec.json.encode({"now_s": now, "ranks": known}), _brief(said))


async def processes(ranks: Sequence[RankSeen], clock: Clock) -> Found | None:  # noqa: ARG001
    """What the kernel knows of each rank that still lives."""
    living = [one for one in ranks if one.pid]
    files = await asyncio.to_thread(lambda: {one.rank: _process(one.pid) for one in living})
    known = {rank: one for rank, one in files.items() if one}
    if not known:
        return None
    said = (f"rank {rank}: {_state(one)}" for rank, one in known.items())
    return Found(msgspec.json.encode({"ranks": known}), _brief(said))


COLLECTORS: Mapping[str, Collector] = {"page": pages, "process": processes}
"""By the name of the evidence."""


def _page(page: PageView) -> dict[str, Any]:
    """All that it says, as it says it; instants are of this host's clock, as `now_s` is.

    Empty as long as its rank has not opened it.
    """
    said: dict[str, Any] = {}
    try:
        reading = page.read()
        if reading is None:
            return {}
        said["page"] = reading
        said["lanes"] = lanes = page.lanes()
        numbers = {frame.section for lane in lanes for frame in lane.frames}
        said["sections"] = {number: page.section(number).name for number in numbers}
    except BadPageError as error:
        said["damaged"] = str(error)
    return said


def _reached(said: Mapping[str, Any], now: float) -> str:
    reading: PageReading | None = said.get("page")
    if reading is None:
        return f"its page is damaged: {said['damaged']}"
    parts = [str(reading.phase), f"step {reading.step}" if reading.step else "no step yet"]
    frames = next((lane.frames for lane in said.get("lanes", ())), ())
    if frames and "sections" in said:
        inner = frames[-1]
        parts.append(f"{now - inner.since_s:.1f} s in {said['sections'][inner.section]}")
    elif reading.progress_s:
        parts.append(f"last moved {now - reading.progress_s:.1f} s ago")
    return ", ".join(parts)


def _process(pid: int) -> dict[str, str]:
    """The files of a process that may be read; none if it is gone."""
    found = {}
    for name in _FILES:
        try:
            with Path(f"/proc/{pid}/{name}").open("rb") as file:
                text = file.read(_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            continue  # it is gone, or the kernel shows this to others only
        if text:
            found[name] = text
    return {"pid": str(pid), **found} if found else {}


def _state(process: Mapping[str, str]) -> str:
    lines = process.get("status", "").splitlines()
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    where = process.get("wchan", "0")
    waits = f" in {where}" if where != "0" else ""
    threads = f", {fields['Threads']} threads" if "Threads" in fields else ""
    return f"{fields.get('State', 'unknown')}{waits}{threads}"


def _brief(said: Iterable[str]) -> str:
    parts: Iterator[str] = iter(said)
    named = list(itertools.islice(parts, _NAMED_MOST))
    more = sum(1 for _ in parts)
    return "; ".join(named) + (f"; and {more} more" if more else "")
