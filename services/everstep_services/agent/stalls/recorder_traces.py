"""The traces of a rank's flight recorders: torch has one for gloo, and others for devices."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from everstep.evidence.archive import unanswered
from everstep_services.agent.stalls.torch_server import TorchServerError, answer, handlers

_GLOO = "fr_trace_json"
_COMMS = ("torchcomms_fr_trace_json", "torch_comms_fr_trace_json")
"""Of the package torchcomms, and of torchcomms as a part of torch."""
_HANDLERS = (_GLOO, "dump_nccl_trace_json", *_COMMS)
_GLOOS = "/gloo"
"""Ends the names of gloo's groups that a device has, too: each of both numbers its own calls."""
_SMALL_BYTES = 1 << 18
"""Decoded within a millisecond: on a busy processor a thread gets its turn later than that."""
_EMPTY = msgspec.Raw(b"[]")
_UNNUMBERED = msgspec.Raw(b"-1")

_Fields = dict[str, msgspec.Raw]


class _Head(msgspec.Struct):
    entries: msgspec.Raw = _EMPTY
    pg_config: _Fields = {}
    pg_status: _Fields = {}


class _Trace(msgspec.Struct):
    entries: list[_Fields] = []
    pg_config: _Fields = {}
    pg_status: _Fields = {}
    version: str = ""


async def read_traces(folder: Path, within_s: float, *, is_whole: bool) -> tuple[bytes, ...]:
    """Ask each recorder of a rank; `TorchServerError` if one of them gives no good answer.

    gloo's lists all entries; the others only those that are not over, unless `is_whole`. The traces
    have no stacks: naming their lines would wait for the interpreter's lock. Recorders that have
    recorded nothing are left out, unless all are empty. A device's recorder asks for the state of
    its events; torch captures no graph while there is one to ask for.
    """
    try:
        async with asyncio.timeout(within_s):
            # Asked each time, in 0.2 ms: a library adds its recorder when it is imported.
            names = await handlers(folder, within_s)
            asked = [name for name in _HANDLERS if name in names]
            bodies = await asyncio.gather(
                *(answer(folder, _question(name, is_whole=is_whole), within_s) for name in asked)
            )
    except TimeoutError:
        raise TorchServerError(unanswered(within_s)) from None
    if not bodies:
        raise TorchServerError("torch's server in it has no flight recorder")
    traces = dict(zip(asked, bodies, strict=True))
    try:
        if sum(map(len, bodies)) < _SMALL_BYTES:
            return _told_apart(traces)
        return await asyncio.to_thread(_told_apart, traces)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise TorchServerError(f"it answered nonsense: {max(bodies, key=len)[:80]!r}") from None


def joined(traces: Sequence[bytes]) -> bytes:
    """Return one dump with the entries of all traces, in the order of their times."""
    if len(traces) == 1:
        return traces[0]
    whole, records, groups = _Trace(), 0, 0
    for trace in (_TRACE.decode(trace) for trace in reversed(traces)):
        for entry in trace.entries:
            entry["record_id"] = _raw(_number(entry, "record_id") + records)
            entry["pg_id"] = _raw(_number(entry, "pg_id") + groups)
        whole.entries += trace.entries
        whole.pg_config |= trace.pg_config
        whole.pg_status |= {str(int(name) + groups): of for name, of in trace.pg_status.items()}
        whole.version = whole.version or trace.version
        records = 1 + max((_number(entry, "record_id") for entry in trace.entries), default=-1)
        groups += 1 + max(map(int, trace.pg_status), default=-1)
    whole.entries.sort(key=lambda entry: _number(entry, "time_created_ns"))
    return msgspec.json.encode(whole)


def _question(handler: str, *, is_whole: bool) -> str:
    question = f"{handler}?onlyactive={'false' if is_whole else 'true'}"
    return f"{question}&includestacktraces=false" if handler == _GLOO else question  # or 400


def _told_apart(bodies: Mapping[str, bytes]) -> tuple[bytes, ...]:
    heads = {handler: _HEAD.decode(body) for handler, body in bodies.items()}
    used = [name for name, head in heads.items() if head.pg_status or head.entries != _EMPTY]
    devices = {name for used_by in used if used_by != _GLOO for name in heads[used_by].pg_config}
    return tuple(_told(handler, bodies[handler], devices) for handler in used or list(bodies)[:1])


def _told(handler: str, body: bytes, devices: set[str]) -> bytes:
    """The trace in which the numbers of a group are the same in all of its ranks."""
    if handler in _COMMS:
        trace = _TRACE.decode(body)
        for entry in trace.entries:
            entry["collective_seq_id"] = _UNNUMBERED  # it counts the calls of all groups
        return msgspec.json.encode(trace)
    if handler != _GLOO or not devices:
        return body
    trace = _TRACE.decode(body)
    for entry in trace.entries:
        name, *more = _NAMES.decode(entry.get("process_group", _EMPTY)) or [""]
        if name in devices:
            entry["process_group"] = _raw([name + _GLOOS, *more])
    trace.pg_config = {
        name + _GLOOS if name in devices else name: group for name, group in trace.pg_config.items()
    }
    return msgspec.json.encode(trace)


def _number(entry: _Fields, name: str) -> int:
    return _NUMBER.decode(entry[name]) if name in entry else 0


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


_HEAD = msgspec.json.Decoder(_Head)
_TRACE = msgspec.json.Decoder(_Trace)
_NAMES = msgspec.json.Decoder(list[str])
_NUMBER = msgspec.json.Decoder(int, strict=False)
