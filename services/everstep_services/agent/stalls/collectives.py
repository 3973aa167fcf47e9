"""How far a rank is in its collectives, read from torch's flight recorder, without the GIL."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from everstep_services.agent.stalls.torch_server import ask

_WITHIN_S = 2.0
_ACTIVE = "fr_trace_json?onlyactive=true&includestacktraces=false"
_WHOLE = "fr_trace_json?onlyactive=false&includestacktraces=false"
_ALL = ("0", "default_pg")
"""The names that torch gives the default group."""


@dataclass(frozen=True, slots=True)
class CollectiveState:
    """The summary of one rank's flight recorder."""

    entered: int
    """The number of collectives that the rank has entered, over all process groups."""
    waits_in: str
    """The oldest collective that the rank is in; empty for none."""
    entered_at_s: float | None = None
    """When it entered the last one that is listed, by the wall clock; None if none is listed."""
    of_all: int | None = None
    """The last collective of the default group, which has all ranks, that it has entered, by its
    number in that group; None if none is listed.
    """
    awaits: int | None = None
    """The oldest collective of the default group that it is in; None if it is in one of another
    group."""


class _Group(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _Entry(msgspec.Struct):
    profiling_name: str = ""
    collective_seq_id: int = -1
    is_p2p: bool = False
    process_group: tuple[str, ...] = ()
    retired: bool = True
    record_id: int = -1
    time_created_ns: int = 0


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    pg_status: Mapping[str, _Group] = {}


async def read_collectives(folder: Path, *, is_whole: bool = False) -> CollectiveState | None:
    """Ask a rank's recorder; None if it has none, or does not answer soon.

    With gloo, everything that is still recorded is listed. With NCCL, only what is not over,
    unless `is_whole`: that is a megabyte, and for ranks that seem to stand.
    """
    body = await ask(folder, _WHOLE if is_whole else _ACTIVE, _WITHIN_S)
    return None if body is None else parse_collectives(body)


def parse_collectives(body: bytes) -> CollectiveState | None:
    """Parse the trace of a flight recorder; None if it is not one."""
    try:
        trace = _TRACE.decode(body)
        entered = sum(max(0, group.last_enqueued_collective) for group in trace.pg_status.values())
    except msgspec.MsgspecError:
        return None
    newest = max(trace.entries, key=lambda entry: entry.record_id, default=None)
    waits_in = next((_name(entry) for entry in trace.entries if not entry.retired), "")
    if newest is None:
        return CollectiveState(entered, waits_in)
    of_all = [entry for entry in trace.entries if _is_of_all(entry)]
    waits = [entry for entry in trace.entries if not entry.retired]
    awaits = [entry.collective_seq_id for entry in of_all if not entry.retired]
    # NCCL records point-to-point calls, and no group counts them
    at_s = newest.time_created_ns / 1e9 if newest.time_created_ns else None
    return CollectiveState(
        max(entered, newest.record_id + 1),
        waits_in,
        at_s,
        max((entry.collective_seq_id for entry in of_all), default=None),
        min(awaits, default=None) if len(awaits) == len(waits) else None,
    )


def _is_of_all(entry: _Entry) -> bool:
    is_numbered = entry.collective_seq_id >= 0 and not entry.is_p2p
    return is_numbered and entry.process_group == _ALL


def _name(entry: _Entry) -> str:
    group = entry.process_group[-1] if entry.process_group else ""
    return f"{entry.profiling_name} of {group}".removesuffix(" of ")


_TRACE = msgspec.json.Decoder(_Trace, strict=False)  # some releases write numbers as strings
