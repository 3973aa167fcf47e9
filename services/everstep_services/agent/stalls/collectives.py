"""How far a rank is in its collectives, as torch's flight recorder says, GIL or no GIL."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep_services.agent.stalls.worker import ask

_WITHIN_S = 2.0
_ACTIVE = "fr_trace_json?onlyactive=true&includestacktraces=false"
_WHOLE = "fr_trace_json?onlyactive=false&includestacktraces=false"


@dataclass(frozen=True, slots=True)
class Collectives:
    """What the flight recorder of one rank says."""

    entered: int
    """How many it has entered, over all process groups."""
    waits_in: str
    """The oldest that it is in; empty for none."""
    entered_at_s: float | None = None
    """When it entered the last that is listed, by the host's wall clock; None if none is."""


class _Group(msgspec.Struct):
    last_enqueued_collective: int | str = -1
    last_completed_collective: int | str = -1


class _Entry(msgspec.Struct):
    profiling_name: str = ""
    process_group: tuple[str, ...] = ()
    retired: bool = True
    record_id: int = -1
    time_created_ns: int = 0


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    pg_status: Mapping[str, _Group] = {}


async def read_collectives(folder: Path, *, is_whole: bool = False) -> Collectives | None:
    """Ask a rank's recorder; None where it has none, or does not answer soon.

    With gloo all that is still recorded is listed. With NCCL only what is not over, unless
    `is_whole`: that is a megabyte, and for ranks that seem to stand.
    """
    body = await ask(folder, _WHOLE if is_whole else _ACTIVE, _WITHIN_S)
    return None if body is None else parse_collectives(body)


def parse_collectives(body: bytes) -> Collectives | None:
    """What a flight recorder's trace shows; None if it is none."""
    try:
        trace = _TRACE.decode(body)
        entered = sum(max(0, int(one.last_enqueued_collective)) for one in trace.pg_status.values())
    except (msgspec.MsgspecError, ValueError):
        return None
    newest = max(trace.entries, key=lambda one: one.record_id, default=None)
    waits_in = next((_name(one) for one in trace.entries if not one.retired), "")
    if newest is None:
        return Collectives(entered, waits_in)
    # What goes from one rank to another is recorded with NCCL, and is in no group's count.
    at_s = newest.time_created_ns / 1e9 if newest.time_created_ns else None
    return Collectives(max(entered, newest.record_id + 1), waits_in, at_s)


def _name(entry: _Entry) -> str:
    group = entry.process_group[-1] if entry.process_group else ""
    return f"{entry.profiling_name} of {group}".removesuffix(" of ")


_TRACE = msgspec.json.Decoder(_Trace)
