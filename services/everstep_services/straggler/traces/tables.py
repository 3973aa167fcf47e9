"""Tables of operations: CSV by the standard library, Parquet by pyarrow."""

import csv
import gzip
import io
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from everstep_services.straggler.domain.operations import Array
from everstep_services.straggler.traces.columns import TEXTS, Builder, TraceError, recognised

_ROWS_AT_ONCE = 50_000


def opened(path: Path, *, compressed: bool) -> IO[bytes]:
    """A file's bytes, unpacked."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if compressed else path.open("rb")


def read_csv(path: Path, *, compressed: bool, into: Builder) -> None:
    """Read a CSV file. Raises `TraceError`."""
    with (
        opened(path, compressed=compressed) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as text,
    ):
        try:
            _read_lines(path, csv.reader(text, strict=True), into)
        except csv.Error as error:
            raise TraceError(path, f"it is not CSV: {error}") from error
        except UnicodeDecodeError as error:
            raise TraceError(path, f"it is not text in UTF-8: {error.reason}") from error


def _read_lines(path: Path, lines: Iterator[list[str]], into: Builder) -> None:
    head = next(lines, None)
    if head is None:
        raise TraceError(path, "it is empty")
    places = recognised(path, head)
    width, done = len(head), 1
    while rows := list(islice(lines, _ROWS_AT_ONCE)):
        first = done
        done += len(rows)
        _check_widths(path, rows, width, first)
        rows = [row for row in rows if row] if not all(rows) else rows
        if not rows:
            continue
        by_place = list(zip(*rows, strict=True))
        columns = {
            name: into.words[name].encoded(by_place[at])
            if name in TEXTS
            else _numbers(path, name, by_place[at], first)
            for name, at in places.items()
        }
        into.add(path, columns, _line(first))


def _line(first: int) -> Callable[[int], str]:
    return lambda row: f"line {first + row + 1}"


def _check_widths(path: Path, rows: list[list[str]], width: int, first: int) -> None:
    if {len(row) for row in rows} <= {width, 0}:
        return
    for at, row in enumerate(rows):
        if row and len(row) != width:
            where = first + at + 1
            raise TraceError(path, f"line {where}: it has {len(row)} columns instead of {width}")


def _numbers(path: Path, name: str, texts: tuple[str, ...], first: int) -> Array:
    try:
        return np.array(texts, dtype=np.float64)
    except (ValueError, OverflowError):
        pass
    values = np.empty(len(texts))
    for at, text in enumerate(texts):
        try:
            values[at] = float(text) if text.strip() else np.nan
        except (ValueError, OverflowError):
            raise TraceError(
                path, f"line {first + at + 1}: {name} {text[:40]!r} is not a number"
            ) from None
    return values


def read_parquet(path: Path, into: Builder) -> None:
    """Read a Parquet file, a part at a time. Raises `TraceError`."""
    import pyarrow as arrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            places = recognised(path, names)
            wanted = {name: names[at] for name, at in places.items()}
            done = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE * 4, columns=list(wanted.values())):
                if batch.num_rows:
                    columns = {
                        name: _column(path, name, batch.column(theirs), into)
                        for name, theirs in wanted.items()
                    }
                    into.add(path, columns, _row(done))
                done += batch.num_rows
    except (arrow.ArrowException, OSError) as error:
        raise TraceError(path, f"it cannot be read as Parquet: {_first_line(error)}") from error


def _row(first: int) -> Callable[[int], str]:
    return lambda row: f"row {first + row + 1}"


def _column(path: Path, name: str, column: Any, into: Builder) -> Array:
    import pyarrow as arrow
    from pyarrow import compute

    if name in TEXTS:
        if arrow.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if not (arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type)):
            column = compute.cast(column, arrow.string(), safe=False)
        coded = compute.dictionary_encode(compute.fill_null(column, ""))
        numbers = into.words[name].encoded(coded.dictionary.to_pylist())
        coded_numbers: Array = numbers[coded.indices.to_numpy(zero_copy_only=False)]
        return coded_numbers
    numeric = arrow.types.is_integer(column.type) or arrow.types.is_floating(column.type)
    if not numeric and not arrow.types.is_null(column.type):
        raise TraceError(path, f"column {name} has {column.type}, and needs numbers")
    values = compute.cast(column, arrow.float64(), safe=False)
    numbers = values.to_numpy(zero_copy_only=False)
    return np.asarray(numbers, dtype=np.float64)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
