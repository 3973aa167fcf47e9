"""Traces of torch.profiler (Kineto's JSON), one file a rank."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from everstep_services.straggler.domain.operations import Array
from everstep_services.straggler.traces.columns import Builder, TraceError
from everstep_services.straggler.traces.tables import opened

_MOST_BYTES = 4 << 30
_STEP = re.compile(r"ProfilerStep\s*#(\d{1,9})$")
_FILE_RANK = re.compile(r"rank[-_]?(\d{1,9})", re.I)
_HOST_PARTS = ("cpu_op", "user_annotation")
_NOT_WORK = re.compile(r"gloo:|nccl:|c10d::|record_param_comms|ProfilerStep|profiler::")
_NAMES = (
    ("dataloader", re.compile(r"dataloader|data_?load", re.I)),
    ("optimizer", re.compile(r"optimizer", re.I)),
    ("backward", re.compile(r"autograd::engine|backward", re.I)),
)


class _Event(msgspec.Struct):
    ph: str = ""
    name: Any = ""
    cat: Any = ""
    ts: Any = None
    dur: Any = None
    tid: Any = None
    args: msgspec.Raw = msgspec.Raw(b"null")


class _Trace(msgspec.Struct):
    traceEvents: list[_Event]  # noqa: N815
    distributedInfo: Any = None  # noqa: N815
    baseTimeNanoseconds: Any = None  # noqa: N815
    host_name: Any = None


class _Described(msgspec.Struct):
    """Torch's description of a collective."""

    collective: Any = msgspec.field(name="Collective name", default=None)
    group: Any = msgspec.field(name="Process Group Name", default=None)
    title: Any = msgspec.field(name="Process Group Description", default=None)
    ranks: Any = msgspec.field(name="Process Group Ranks", default=None)
    sequence: Any = msgspec.field(name="Seq", default=None)
    external: Any = msgspec.field(name="External id", default=None)


@dataclass
class ProfilerTraces:
    """Reads one file after another; a rank may have only one file."""

    into: Builder
    notes: list[str] = field(default_factory=list)
    _ranks: dict[int, Path] = field(default_factory=dict)
    _base_ns: int | None = None

    def read(self, path: Path, *, compressed: bool) -> None:
        """Read a file. Raises `TraceError`."""
        trace = _decoded(path, compressed=compressed)
        if not trace.traceEvents:
            raise TraceError(path, "it holds no events")
        rank = self._rank(path, trace)
        base = trace.baseTimeNanoseconds if isinstance(trace.baseTimeNanoseconds, int) else 0
        if self._base_ns is None:
            self._base_ns = base
        rows = _rows(path, trace, rank, self._groups(trace))
        columns: dict[str, Array] = {
            "rank": np.full(len(rows), float(rank)),
            "step": np.array([float(row.step) for row in rows]),
            "op": self.into.words["op"].encoded([row.op for row in rows]),
            "start": np.array([row.start for row in rows]) * 1e-6 + (base - self._base_ns) * 1e-9,
            "duration": np.array([row.duration for row in rows]) * 1e-6,
            "group": self.into.words["group"].encoded([row.group for row in rows]),
            "sequence": np.array([row.sequence for row in rows]),
            "gap": self.into.words["op"].encoded([row.gap for row in rows]),
        }
        if isinstance(trace.host_name, str) and trace.host_name:
            columns["host"] = self.into.words["host"].encoded([trace.host_name[:64]] * len(rows))
        self.into.add(path, columns, lambda row: f"operation {rows[row].op!r}")

    def _rank(self, path: Path, trace: _Trace) -> int:
        about = trace.distributedInfo if isinstance(trace.distributedInfo, dict) else {}
        rank = about.get("rank")
        named = _FILE_RANK.search(path.name)
        if not isinstance(rank, int) or isinstance(rank, bool):
            if named is None:
                raise TraceError(
                    path, "its rank is missing (distributedInfo): name the file rankN.json"
                )
            rank = int(named[1])
        if not 0 <= rank < 2**31:
            raise TraceError(path, f"its rank is {rank}")
        if rank in self._ranks:
            raise TraceError(path, f"rank {rank} is that of {self._ranks[rank]}, too")
        self._ranks[rank] = path
        return rank

    def _groups(self, trace: _Trace) -> str:
        """The only possible group of collectives without a group; empty if there are several."""
        about = trace.distributedInfo if isinstance(trace.distributedInfo, dict) else {}
        configured = about.get("pg_config")
        groups = configured if isinstance(configured, list) else []
        if len(groups) <= 1:
            return "default"
        if str(about.get("backend")) == "gloo" and not any("gloo" in note for note in self.notes):
            self.notes.append(
                "gloo does not record the process group of a collective: with several groups it is "
                "unknown which rank waits for which"
            )
        return ""


def _decoded(path: Path, *, compressed: bool) -> _Trace:
    with opened(path, compressed=compressed) as file:
        text = file.read(_MOST_BYTES + 1)
    if len(text) > _MOST_BYTES:
        raise TraceError(path, f"it is larger than {_MOST_BYTES >> 30} GiB: profile fewer steps")
    try:
        if text.lstrip()[:1] == b"[":
            return _Trace(msgspec.json.decode(text, type=list[_Event]))
        return msgspec.json.decode(text, type=_Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(path, f"it is not a trace of torch.profiler: {error}") from error


@dataclass(slots=True)
class _Row:
    step: int
    op: str
    start: float
    """Microseconds, as the file has them."""
    duration: float
    group: str = ""
    sequence: float = np.nan
    gap: str = ""
    """What the profiler shows about the time before it, in which nothing else of the rank ran."""


def _rows(path: Path, trace: _Trace, rank: int, group: str) -> list[_Row]:
    events = [event for event in trace.traceEvents if _timed(event)]
    steps = _steps(path, events)
    bounds = np.array([step.start for step in steps])
    collectives = _collectives(events, group or f"of rank {rank}")
    rows = [*collectives, *_computations(events, collectives)]
    places = np.searchsorted(bounds, [row.start for row in rows], side="right") - 1
    inside = []
    for row, place in zip(rows, places, strict=True):
        if place >= 0 and row.start < steps[place].start + steps[place].duration:
            row.step = steps[place].step
            inside.append(row)
    _name_gaps(inside, steps, events)
    return inside


_LEAST_GAP_US = 50.0
_SHOWS = 0.5
"""The share of a gap that must be within an event to be named after it."""
_HOST_EVENTS = frozenset(
    {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"}
)


def _name_gaps(rows: Sequence[_Row], steps: Sequence[_Row], events: Sequence[_Event]) -> None:
    """Name the times of a step in which no operation ran by what the host did meanwhile."""
    hosts = sorted(
        (
            event
            for event in events
            if event.cat in _HOST_EVENTS
            and event.dur >= _SHOWS * _LEAST_GAP_US
            and not _NOT_WORK.match(event.name)
        ),
        key=lambda event: event.ts,
    )
    begins = {step.step: step.start for step in steps}
    active: list[_Event] = []
    at, end = 0, -np.inf
    for row in sorted(rows, key=lambda row: row.start):
        begin = begins[row.step] if end == -np.inf else end
        end = max(end, row.start + row.duration)
        if row.start - begin < _LEAST_GAP_US:
            continue
        while at < len(hosts) and hosts[at].ts < row.start:
            active.append(hosts[at])
            at += 1
        active = [event for event in active if event.ts + event.dur > begin]
        row.gap = _gap_name(active, begin, row.start)


def _gap_name(events: Sequence[_Event], begin: float, end: float) -> str:
    """Of the events that fill most of a gap the data loader, else the innermost; else `gap`."""
    least = _SHOWS * (end - begin)
    most = [
        event
        for event in events
        if min(event.ts + event.dur, end) - max(float(event.ts), begin) >= least
    ]
    if any(_kind(event.name) == "dataloader" for event in most):
        return "gap: dataloader"
    if not most:
        return "gap"
    return f"gap: {min(most, key=lambda event: event.dur).name}"[:128]


def _timed(event: _Event) -> bool:
    return (
        event.ph == "X"
        and isinstance(event.ts, int | float)
        and isinstance(event.dur, int | float)
        and isinstance(event.name, str)
        and abs(event.ts) < 1e17
        and 0 <= event.dur < 1e13
    )


def _steps(path: Path, events: Sequence[_Event]) -> list[_Row]:
    steps: dict[int, _Row] = {}
    for event in events:
        named = _STEP.match(event.name)
        if named and event.cat == "user_annotation":
            steps[int(named[1])] = _Row(int(named[1]), "", float(event.ts), float(event.dur))
    if not steps:
        raise TraceError(path, "it has no steps: call the profiler's step() once a step")
    return sorted(steps.values(), key=lambda step: step.start)


def _collectives(events: Sequence[_Event], group: str) -> list[_Row]:
    """NCCL's kernels where the trace has them, else the operations of gloo's threads."""
    described = {
        about.external: about
        for event in events
        if event.name == "record_param_comms" and (about := _about(event)).external is not None
    }
    kernels = [event for event in events if event.cat == "kernel" and event.name.startswith("nccl")]
    if kernels:
        return [_kernel(event, described, group) for event in kernels]
    return [
        _Row(-1, event.name, float(event.ts), float(event.dur), group)
        for event in events
        if event.cat == "user_annotation" and event.name.startswith("gloo:")
    ]


def _about(event: _Event) -> _Described:
    try:
        return msgspec.json.decode(event.args, type=_Described)
    except msgspec.MsgspecError:
        return _Described()


def _kernel(event: _Event, described: dict[Any, _Described], group: str) -> _Row:
    about = _about(event)
    asked = described.get(about.external) if isinstance(about.external, int) else None
    name = about.collective or (asked.collective if asked else None)
    if not isinstance(name, str) or not name:
        name = event.name.partition("(")[0].removeprefix("ncclDevKernel_").partition("_")[0]
    of = about if about.group is not None else asked
    if of is not None and of.group is not None:
        members = of.ranks if isinstance(of.ranks, str) else ""
        group = f"{of.title or of.group} {members}".strip()[:500]
    sequence = asked.sequence if asked is not None else about.sequence
    number = float(sequence) if isinstance(sequence, int) and 0 <= sequence < 2**53 else np.nan
    plain = name.lower().removeprefix("nccl:").strip("_")
    return _Row(-1, f"nccl:{plain}"[:128], float(event.ts), float(event.dur), group, number)


def _computations(events: Sequence[_Event], collectives: Sequence[_Row]) -> list[_Row]:
    """The device's kernels where there are any, else the outermost operations of the host.

    Operations of one kind that follow at once become one row, unless a collective begins between.
    """
    kernels = [
        event
        for event in events
        if event.cat in {"kernel", "gpu_memcpy"} and "nccl" not in event.name
    ]
    if kernels:
        pieces = [
            ("kernels", float(kernel.ts), float(kernel.ts + kernel.dur)) for kernel in kernels
        ]
    else:
        pieces = _outermost(events)
    pieces.sort(key=lambda piece: piece[1])
    begins = np.sort([row.start for row in collectives])
    rows: list[_Row] = []
    for name, begin, end in pieces:
        last, start = rows[-1] if rows else None, begin
        if last is not None and start < last.start + last.duration:
            start = last.start + last.duration  # two threads or streams at once: time counts once
            if end <= start:
                continue
        if last is not None and last.op == name and _joined(last, start, begins):
            last.duration = end - last.start
        else:
            rows.append(_Row(-1, name, start, end - start))
    return rows


def _joined(last: _Row, start: float, begins: Array) -> bool:
    """Whether the gap between two operations is tiny, and no collective begins in it."""
    gap = start - (last.start + last.duration)
    between = np.searchsorted(begins, (last.start, start))
    return gap < 50 and between[0] == between[1]


def _outermost(events: Sequence[_Event]) -> list[tuple[str, float, float]]:
    host = [
        event for event in events if event.cat in _HOST_PARTS and not _NOT_WORK.match(event.name)
    ]
    host.sort(key=lambda event: (str(event.tid), event.ts, -event.dur))
    outermost, thread, end = [], None, -np.inf
    for event in host:
        if event.tid == thread and event.ts < end:
            continue
        thread, end = event.tid, event.ts + event.dur
        outermost.append((_kind(event.name), float(event.ts), float(end)))
    return outermost


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _NAMES if pattern.search(name)), "forward")
