"""The progress of each rank from its page, and the kernel's view of its process."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.clock import Clock
from everstep_services.agent.collectors.collection import EvidenceFound, Scene, brief
from trainer_sdk.page import BadPageError, PageView
from trainer_sdk.page_content import PageReading

_FILES = ("status", "wchan", "stack", "io", "stat")
"""None of them waits for the process; `cmdline`, `environ` and `maps` may, and are left alone."""
_FILE_BYTES = 8192


async def pages(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The progress of each rank from its own page, also of ranks that are gone."""
    now = clock.now()
    read = {rank.rank: _page(rank.page) for rank in scene.ranks}
    readable = {rank: lines for rank, lines in read.items() if lines}
    if not readable:
        return None
    lines = (f"rank {rank}: {_reached(rank_seen, now)}" for rank, rank_seen in readable.items())
    return EvidenceFound(brief(lines), msgspec.json.encode({"now_s": now, "ranks": readable}))


async def processes(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The kernel's view of each rank that still lives."""
    del clock
    living = [rank for rank in scene.ranks if rank.pid]
    files = await asyncio.to_thread(
        lambda: {rank_seen.rank: _process(rank_seen.pid) for rank_seen in living}
    )
    readable = {rank: rank_seen for rank, rank_seen in files.items() if rank_seen}
    if not readable:
        return None
    lines = (f"rank {rank}: {_state(rank_seen)}" for rank, rank_seen in readable.items())
    return EvidenceFound(brief(lines), msgspec.json.encode({"ranks": readable}))


def _page(page: PageView) -> dict[str, Any]:
    """Everything on the page, unchanged; instants are of this host's clock, like `now_s`.

    Empty until the rank has opened it.
    """
    words: dict[str, Any] = {}
    try:
        reading = page.read()
        if reading is None:
            return {}
        words["page"] = reading
        words["lanes"] = lanes = page.lanes()
        numbers = {frame.section for lane in lanes for frame in lane.frames}
        words["sections"] = {number: page.section(number).name for number in numbers}
    except BadPageError as error:
        words["damaged"] = str(error)
    return words


def _reached(page: Mapping[str, Any], now: float) -> str:
    reading: PageReading | None = page.get("page")
    if reading is None:
        return f"its page is damaged: {page['damaged']}"
    parts = [str(reading.phase), f"step {reading.step}" if reading.step else "no step yet"]
    frames = next((lane.frames for lane in page.get("lanes", ())), ())
    if frames and "sections" in page:
        inner = frames[-1]
        parts.append(f"{now - inner.since_s:.1f} s in {page['sections'][inner.section]}")
    elif reading.progress_s:
        parts.append(f"last moved {now - reading.progress_s:.1f} s ago")
    return ", ".join(parts)


def _process(pid: int) -> dict[str, str]:
    """The files of a process that may be read; none if it is gone."""
    texts = {}
    for name in _FILES:
        try:
            with Path(f"/proc/{pid}/{name}").open("rb") as file:
                text = file.read(_FILE_BYTES).decode(errors="replace").strip()
        except OSError:
            continue  # it is gone, or the kernel shows this to others only
        if text:
            texts[name] = text
    return {"pid": str(pid), **texts} if texts else {}


def _state(process: Mapping[str, str]) -> str:
    lines = process.get("status", "").splitlines()
    fields = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
    where = process.get("wchan", "0")
    waits = f" in {where}" if where != "0" else ""
    threads = f", {fields['Threads']} threads" if "Threads" in fields else ""
    return f"{fields.get('State', 'unknown')}{waits}{threads}"
