"""Logs of NCCL's Inspector, the profiler plugin that comes with NCCL: a file a process.

Each line is one operation of one communicator (formats 4.0 to 4.3). It has times of its own only
if `NCCL_INSPECTOR_DUMP_VERBOSE` is 1, and knows neither steps nor ranks of the world: the ranks are
those of the communicator that joins all processes, and a step is what that one repeats. The time
between two calls is the rank's own.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np

from everstep_services.straggler.domain.operations import BETWEEN_CALLS, Array
from everstep_services.straggler.traces.columns import Builder, TraceError
from everstep_services.straggler.traces.tables import opened

MARK = b'"inspector_output_format_version"'
"""What the first line of each of its files has."""
_LONGEST_STEP = 4096
"""The most collectives of a step."""

_Process: TypeAlias = tuple[str, int]


class _Header(msgspec.Struct):
    id: str
    rank: int
    n_ranks: int


class _Metadata(msgspec.Struct):
    hostname: str
    pid: int


class _Channel(msgspec.Struct):
    kernel_start_ts: int


class _Times(msgspec.Struct):
    kernel_events: list[_Channel]


class _Collective(msgspec.Struct):
    coll: str
    coll_sn: int
    coll_msg_size_bytes: int
    coll_exec_time_us: float
    event_trace_ts: _Times | None = None


class _Transfer(msgspec.Struct):
    p2p: str
    p2p_peer: int
    p2p_msg_size_bytes: int
    p2p_exec_time_us: float
    event_trace_ts: _Times | None = None


class _Line(msgspec.Struct):
    header: _Header | None = None
    metadata: _Metadata | None = None
    coll_perf: _Collective | None = None
    p2p_perf: _Transfer | None = None


_DECODER = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class _Row:
    line: int
    group: str
    op: str
    size: int
    duration_us: float
    start_us: float
    sequence: int = -1
    """Some releases number the calls of a name, others those of a communicator."""


@dataclass
class InspectorLogs:
    """Reads one file after another, and adds all of them at the end."""

    into: Builder
    notes: list[str] = field(default_factory=list)
    _files: dict[_Process, tuple[Path, list[_Row]]] = field(default_factory=dict)
    _members: dict[str, dict[_Process, int]] = field(default_factory=dict)
    """The ranks of each communicator."""
    _sizes: dict[str, int] = field(default_factory=dict)

    def read(self, path: Path, *, compressed: bool) -> None:
        """Read a file. Raises `TraceError`."""
        header, process = None, None
        rows: list[_Row] = []
        with opened(path, compressed=compressed) as file:
            for number, text in enumerate(file, 1):
                line = self._decoded(path, number, text)
                if line is None:
                    break
                header = line.header or header
                if line.metadata is not None:
                    process = _same(path, number, process, line.metadata)
                if header is None or process is None:
                    raise TraceError(path, f"line {number}: it names no communicator or process")
                self._members.setdefault(header.id, {})[process] = header.rank
                self._sizes[header.id] = header.n_ranks
                rows += _rows(path, number, header, line)
        if process is None or not rows:
            raise TraceError(path, "it holds no operations")
        if process in self._files:
            other = self._files[process][0]
            raise TraceError(path, f"process {process[1]} of {process[0]} has {other}, too")
        self._files[process] = path, rows

    def _decoded(self, path: Path, number: int, text: bytes) -> _Line | None:
        """None for a last line that is cut off: its process was killed while it wrote."""
        try:
            return _DECODER.decode(text)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            if text.endswith(b"\n"):
                raise TraceError(path, f"line {number}: not of NCCL's Inspector: {error}") from None
        self.notes.append(f"{path.name} ends within line {number}, which is left out")
        return None

    def add(self) -> None:
        """Add what was read to the table. Raises `TraceError`."""
        if not self._files:
            return
        group = self._world()
        places = self._members[group]
        inside = {process: it for process, it in self._files.items() if process in places}
        op, firsts = _steps([row for _, rows in inside.values() for row in rows], group)
        for process, (path, rows) in inside.items():
            stepped: list[tuple[int, _Row]] = []
            step, end_us = -1, 0.0
            for row in sorted(rows, key=lambda row: row.start_us):
                if (row.group, row.op) == (group, op):
                    step = bisect_right(firsts, row.sequence) - 1
                if step >= 0 and 0 < end_us < row.start_us:
                    own = _Row(row.line, "", BETWEEN_CALLS, 0, row.start_us - end_us, end_us)
                    stepped.append((step, own))
                if step >= 0:
                    stepped.append((step, row))
                end_us = max(end_us, row.start_us + row.duration_us)
            self._add(path, places[process], process[0], stepped)

    def _world(self) -> str:
        """The communicator that most processes have in common."""
        members = {
            group: len(self._files.keys() & ranks.keys()) for group, ranks in self._members.items()
        }
        group = max(members, key=lambda name: (members[name], self._sizes[name], name))
        outside = len(self._files) - members[group]
        if outside:
            self.notes.append(
                f"{outside} of {len(self._files)} processes are not in the largest communicator, "
                f"{group} of {self._sizes[group]} ranks, and are left out"
            )
        return group

    def _add(self, path: Path, rank: int, host: str, rows: Sequence[tuple[int, _Row]]) -> None:
        texts = self.into.words
        columns: dict[str, Array] = {
            "rank": np.full(len(rows), float(rank)),
            "step": np.array([float(step) for step, _ in rows]),
            "op": texts["op"].encoded([row.op for _, row in rows]),
            "start": np.array([row.start_us for _, row in rows]) * 1e-6,
            "duration": np.array([row.duration_us for _, row in rows]) * 1e-6,
            "group": texts["group"].encoded([row.group for _, row in rows]),
            "sequence": np.array([float(row.sequence) for _, row in rows]),
            "host": texts["host"].encoded([host[:64]] * len(rows)),
        }
        self.into.add(path, columns, lambda row: f"line {rows[row][1].line}")


def _same(path: Path, number: int, process: _Process | None, now: _Metadata) -> _Process:
    if process is not None and process != (now.hostname, now.pid):
        raise TraceError(path, f"line {number}: it is of another process, {now.pid}")
    return now.hostname, now.pid


def _rows(path: Path, number: int, header: _Header, line: _Line) -> list[_Row]:
    rows = []
    if (call := line.coll_perf) is not None:
        rows.append(
            _Row(
                number, header.id, f"nccl:{call.coll.lower()}"[:128], call.coll_msg_size_bytes,
                call.coll_exec_time_us, _start(path, number, call.event_trace_ts), call.coll_sn,
            )
        )  # fmt: skip
    if (transfer := line.p2p_perf) is not None:
        name, ends = transfer.p2p.lower(), (header.rank, transfer.p2p_peer)
        source, target = ends if name == "send" else ends[::-1]
        rows.append(
            _Row(
                number, f"{header.id} {source} to {target}", name[:128],
                transfer.p2p_msg_size_bytes, transfer.p2p_exec_time_us,
                _start(path, number, transfer.event_trace_ts),
            )
        )  # fmt: skip
    return rows


def _start(path: Path, number: int, times: _Times | None) -> int:
    starts = [channel.kernel_start_ts for channel in times.kernel_events] if times else []
    if not starts or min(starts) <= 0:
        raise TraceError(
            path, f"line {number}: it has no times; log with NCCL_INSPECTOR_DUMP_VERBOSE=1"
        )
    return min(starts)


def _steps(rows: Sequence[_Row], group: str) -> tuple[str, list[int]]:
    """The most usual call in a communicator, and its number at the begin of each step."""
    counts = Counter(row.op for row in rows if row.group == group)
    op = max(counts, key=lambda name: (counts[name], name))
    sizes = {row.sequence: row.size for row in rows if (row.group, row.op) == (group, op)}
    numbers = sorted(sizes)
    return op, numbers[:: period_of([sizes[number] for number in numbers])]


def period_of(sizes: Sequence[int]) -> int:
    """After how many calls their sizes repeat, by the later half; 1 if they do not."""
    late = np.array(sizes[len(sizes) // 2 :])
    longest = min(_LONGEST_STEP, len(late) // 2)
    periods = range(1, longest + 1)
    return next((it for it in periods if np.array_equal(late[it:], late[:-it])), 1)
