"""Reads traces: tables of operations, and the files of torch.profiler and NCCL's Inspector."""

import gzip
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from everstep.evidence.files import open_regular
from everstep_services.straggler.domain.operations import Operations
from everstep_services.straggler.traces.columns import UNITS, Builder, TraceError
from everstep_services.straggler.traces.inspector import MARK, InspectorLogs
from everstep_services.straggler.traces.profiler import ProfilerTraces
from everstep_services.straggler.traces.tables import read_csv, read_parquet

__all__ = ["Read", "TraceError", "read_traces"]


Format = Literal["csv", "parquet", "profiler", "inspector"]


_FAMILIES = {"profiler": "traces of torch.profiler", "inspector": "logs of NCCL's Inspector"}


@dataclass(frozen=True, slots=True)
class Read:
    table: Operations
    notes: tuple[str, ...]


def read_traces(paths: Sequence[Path], unit: str = "s") -> Read:
    """Read tables of operations, torch.profiler's traces or Inspector's logs. Raises `TraceError`.

    `unit` is that of tables; the others have their own.
    """
    kinds = {path: _opened(path) for path in paths}
    formats = {_FAMILIES.get(kind, "tables") for kind, _ in kinds.values()}
    if len(formats) > 1:
        raise TraceError(paths[0], f"{' and '.join(sorted(formats))} cannot be mixed")
    builder = Builder(UNITS[unit] if "tables" in formats else 1.0)
    profiler, inspector = ProfilerTraces(builder), InspectorLogs(builder)
    for path, (kind, compressed) in kinds.items():
        try:
            match kind:
                case "profiler":
                    profiler.read(path, compressed=compressed)
                case "inspector":
                    inspector.read(path, compressed=compressed)
                case "parquet":
                    read_parquet(path, builder)
                case "csv":
                    read_csv(path, compressed=compressed, into=builder)
        except (OSError, EOFError, zlib.error) as error:
            raise _unreadable(path, error) from error
    inspector.add()
    return Read(builder.table(paths[0]), (*profiler.notes, *inspector.notes))


def _opened(path: Path) -> tuple[Format, bool]:
    try:
        with open_regular(path) as file:
            begin = file.read(4096)
        compressed = begin[:2] == b"\x1f\x8b"
        if compressed:
            with gzip.open(path, "rb") as inner:
                begin = inner.read(4096)
    except (OSError, EOFError, zlib.error) as error:
        raise _unreadable(path, error) from error
    if begin[:4] == b"PAR1":
        if compressed:
            raise TraceError(path, "it is Parquet within gzip: unpack it first")
        return "parquet", False
    if not begin:
        raise TraceError(path, "it is empty")
    if MARK in begin:
        return "inspector", compressed
    return ("profiler" if begin.lstrip()[:1] in {b"{", b"["} else "csv"), compressed


def _unreadable(path: Path, error: BaseException) -> TraceError:
    why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return TraceError(path, f"it cannot be read: {why or type(error).__name__}")
