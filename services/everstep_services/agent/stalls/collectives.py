"""How far a rank is in its collectives, read from torch's flight recorders, without the GIL."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from everstep.hashing import hash_of
from everstep.messages import NameExcuse
from everstep_services.agent.stalls.recorder_traces import read_traces
from everstep_services.agent.stalls.torch_server import TorchServerError

_WITHIN_S = 2.0
GONE = 0.0
"""Stands for the instant of a first collective that is no longer listed."""
DEFAULT_GROUP = "0"
_DEFAULT_NAMES = (DEFAULT_GROUP, "default_pg")
"""The names that torch gives the default group, which has all ranks."""
_GROUPS_MOST = 64
"""The limit of the process groups that are read: those of the latest collectives."""


@dataclass(frozen=True, slots=True)
class CollectiveState:
    """The summary of one rank's flight recorders."""

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
    is_unclear: bool = False
    """Whether only the whole trace tells which of its transfers are over."""


class _Group(msgspec.Struct):
    last_enqueued_collective: int = -1
    last_completed_collective: int = -1


class _Config(msgspec.Struct):
    ranks: str = ""


class _Entry(msgspec.Struct):
    profiling_name: str = ""
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    is_p2p: bool = False
    process_group: tuple[str, ...] = ()
    pg_id: int = -1
    state: str = ""
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
    """Ask a rank's recorders; None if it has none, or if one does not answer soon.

    With gloo, everything that is still recorded is listed. With NCCL, only what is not over,
    unless `is_whole`: that is a megabyte, and for ranks that seem to stand.
    """
    try:
        return parse_collectives(await read_traces(folder, _WITHIN_S, is_whole=is_whole))
    except TorchServerError:
        return None


async def read_first_entered(folder: Path) -> float | None:
    """When a rank entered its first collective, by the wall clock; None if it has entered none."""
    try:
        traces = await read_traces(folder, _WITHIN_S, is_whole=True)
        entries = [min(trace.entries, key=lambda entry: entry.record_id)
                   for trace in map(_TRACE.decode, traces) if trace.entries]  # fmt: skip
    except (TorchServerError, msgspec.MsgspecError):
        return None
    if not entries:
        return None
    is_whole = all(entry.record_id == 0 for entry in entries)
    return min(entry.time_created_ns for entry in entries) / 1e9 if is_whole else GONE


def parse_collectives(traces: Sequence[bytes]) -> CollectiveState | None:
    """Parse the traces of a rank's flight recorders; None if one is not a trace."""
    try:
        states = [_state(_TRACE.decode(trace)) for trace in traces]
    except msgspec.MsgspecError:
        return None
    if len(states) == 1:
        return states[0][1]
    waiting = [(since_ns, state) for since_ns, state in states if state.waits_in]
    newest = [state.entered_at_s for _, state in states if state.entered]
    instants = [at_s for at_s in newest if at_s is not None]
    return CollectiveState(
        sum(state.entered for _, state in states),
        min(waiting, key=lambda wait: wait[0])[1].waits_in if waiting else "",
        max(instants, default=None) if len(instants) == len(newest) else None,
        {group: number for _, state in states for group, number in state.entered_in.items()},
        waiting[0][1].awaits if len(waiting) == 1 else None,
        any(state.is_unclear for _, state in states),
    )


def _state(trace: _Trace) -> tuple[int, CollectiveState]:
    """Since when the rank is in its oldest collective, and the summary of one recorder."""
    entered = sum(max(0, group.last_enqueued_collective) for group in trace.pg_status.values())
    newest = max(trace.entries, key=lambda entry: entry.record_id, default=None)
    if newest is None:
        return 0, CollectiveState(entered, "")
    waits, names = [*_waits(trace.entries)], _names(trace)
    return waits[0].time_created_ns if waits else 0, CollectiveState(
        # NCCL records point-to-point calls, and no group counts them
        max(entered, newest.record_id + 1),
        _name(waits[0]) if waits else "",
        newest.time_created_ns / 1e9 if newest.time_created_ns else None,
        _entered_in(trace, names),
        _awaits(waits, names),
        is_unclear=any(_is_unclear(entry, trace) for entry in waits),
    )


def _waits(entries: Sequence[_Entry]) -> Iterator[_Entry]:
    """The entries that are not over.

    NCCL retires what it has given up, too. It never notes that the parts of a batch are over: the
    entry that closes the batch has their state.
    """
    closes = {_batch(entry): entry for entry in entries if _is_close(entry)}
    for entry in entries:
        is_over = entry.state == "completed" or (entry.retired and not _is_nccl(entry))
        if not is_over and closes.get(_batch(entry), entry) is entry:
            yield entry


def _is_unclear(entry: _Entry, trace: _Trace) -> bool:
    """Whether it may be a part of a batch that is over, and therefore no longer listed."""
    status = trace.pg_status.get(str(entry.pg_id), _Group())
    is_passed = 0 <= entry.collective_seq_id <= status.last_completed_collective
    return _is_nccl(entry) and not _is_close(entry) and (entry.is_p2p or is_passed)


def _is_nccl(entry: _Entry) -> bool:
    return entry.profiling_name.startswith("nccl:")


def _is_close(entry: _Entry) -> bool:
    return entry.profiling_name.endswith("coalesced")


def _batch(entry: _Entry) -> tuple[object, ...]:
    return entry.process_group, entry.collective_seq_id, entry.p2p_seq_id


def _entered_in(trace: _Trace, names: Mapping[str, str]) -> Mapping[str, int]:
    entered: dict[str, int] = {}
    for entry in sorted(trace.entries, key=lambda entry: entry.record_id, reverse=True):
        group = _group(entry, names)
        if group and (group in entered or len(entered) < _GROUPS_MOST):
            entered[group] = max(entered.get(group, -1), entry.collective_seq_id)
    return entered


def _awaits(waits: Sequence[_Entry], names: Mapping[str, str]) -> tuple[str, int] | None:
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
