"""How far a rank is in its collectives, read from torch's flight recorder, without the GIL."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.hashing import hash_of
from everstep.messages import NameExcuse
from everstep_services.agent.stalls.torch_server import ask

_WITHIN_S = 2.0
_ACTIVE = "fr_trace_json?onlyactive=true&includestacktraces=false"
_WHOLE = "fr_trace_json?onlyactive=false&includestacktraces=false"
DEFAULT_GROUP = "0"
_DEFAULT_NAMES = (DEFAULT_GROUP, "default_pg")
"""The names that torch gives the default group, which has all ranks."""
_GROUPS_MOST = 64
"""The limit of the process groups that are read: those of the latest collectives."""


@dataclass(frozen=True, slots=True)
class CollectiveState:
    """The summary of one rank's flight recorder."""

    entered: int
    """The number of collectives that the rank has entered, over all process groups."""
    waits_in: str
    """The oldest collective that the rank is in; empty for none."""
    entered_at_s: float | None = None
    """When it entered the last one that is listed, by the wall clock; None if none is listed."""
    entered_in: Mapping[str, int] = field(default_factory=dict)
    """By process group: the last listed collective that it has entered, by its number there."""
    awaits: tuple[str, int] | None = None
    """The oldest collective that it is in: its group, and its number there; None if it is in
    collectives of several groups, or in a call between two ranks."""


class _Group(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _Config(msgspec.Struct):
    ranks: str = ""


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
    pg_config: Mapping[str, _Config] = {}


def entered_of(order: NameExcuse) -> Mapping[str, int]:
    """Return the last collectives that the late rank has entered, by process group."""
    if order.entered_in or order.entered is None:
        return {position.group: position.entered for position in order.entered_in}
    return {DEFAULT_GROUP: order.entered}  # an older release has asked its agent


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
    names = _names(trace)
    # NCCL records point-to-point calls, and no group counts them
    at_s = newest.time_created_ns / 1e9 if newest.time_created_ns else None
    return CollectiveState(
        max(entered, newest.record_id + 1),
        waits_in,
        at_s,
        _entered_in(trace, names),
        _awaits(trace, names),
    )


def _entered_in(trace: _Trace, names: Mapping[str, str]) -> Mapping[str, int]:
    entered: dict[str, int] = {}
    for entry in sorted(trace.entries, key=lambda entry: entry.record_id, reverse=True):
        group = _group(entry, names)
        if group and (group in entered or len(entered) < _GROUPS_MOST):
            entered[group] = max(entered.get(group, -1), entry.collective_seq_id)
    return entered


def _awaits(trace: _Trace, names: Mapping[str, str]) -> tuple[str, int] | None:
    waits = [entry for entry in trace.entries if not entry.retired]
    groups = {_group(entry, names) for entry in waits}
    if len(groups) != 1 or "" in groups:
        return None
    return groups.pop(), min(entry.collective_seq_id for entry in waits)


def _group(entry: _Entry, names: Mapping[str, str]) -> str:
    """Return the same name in all ranks of its group; empty for a call between two ranks."""
    if entry.collective_seq_id < 0 or entry.is_p2p or not entry.process_group:
        return ""
    if entry.process_group == _DEFAULT_NAMES:
        return DEFAULT_GROUP
    name = entry.process_group[0]
    return names.get(name, name)


def _names(trace: _Trace) -> Mapping[str, str]:
    """Return the names of the groups whose ranks are recorded.

    Groups that torch splits off an NCCL communicator have one name for all parts: their ranks tell
    them apart.
    """
    ranks = {name: config.ranks.strip("[]") for name, config in trace.pg_config.items()}
    return {
        name: f"{name}/{hash_of(members.encode())}" for name, members in ranks.items() if members
    }


def _name(entry: _Entry) -> str:
    group = entry.process_group[-1] if entry.process_group else ""
    return f"{entry.profiling_name} of {group}".removesuffix(" of ")


_TRACE = msgspec.json.Decoder(_Trace, strict=False)  # some releases write numbers as strings
