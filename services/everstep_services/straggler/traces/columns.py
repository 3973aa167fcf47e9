"""Columns of a table of operations: their names, and their valid values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everstep.errors import EverstepError
from everstep_services.straggler.domain.arrays import combined
from everstep_services.straggler.domain.operations import Array, Operations, Place


class TraceError(EverstepError):
    """A file cannot be used: the text says which, where and why."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"{path}: {text}")


REQUIRED = ("rank", "step", "op", "start", "duration")
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "group": ("group", "process_group"),
    "role": ("role",),
    "data": ("data_rank", "dp_rank", "data", "dp"),
    "pipeline": ("pipeline_rank", "pp_rank", "pipeline", "pp", "stage"),
    "tensor": ("tensor_rank", "tp_rank", "tensor", "tp"),
    "expert": ("expert_rank", "ep_rank", "expert", "ep"),
    "microbatch": ("microbatch", "micro_batch", "mb", "mb_id"),
    "sequence": ("sequence", "seq", "seq_id"),
    "tokens": ("tokens", "sequence_length", "seq_len"),
    "host": ("host", "node"),
    "op": ("op", "optype"),
    "start": ("start", "start_ts"),
    **{name: (name,) for name in ("rank", "step", "duration")},
}
TEXTS = frozenset({"op", "group", "role", "host"})
_WHOLE = frozenset(
    {"rank", "step", "data", "pipeline", "tensor", "expert", "microbatch", "sequence"}
)
_PLACES = ("data", "pipeline", "tensor", "expert")
_TIMES = ("start", "duration")
_IDENTITY = ("op", "group", "microbatch", "sequence")
"""The columns that distinguish the operations of a rank's step."""
_LARGEST = 2**31 - 2
_LONGEST_S = 1e7
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MOST_ROWS = 50_000_000


def recognised(path: Path, names: Sequence[str]) -> dict[str, int]:
    """The place of each known column; other columns are ignored."""
    numbers: dict[str, int] = {}
    plain = [str(name).strip().lower().replace(" ", "_") for name in names]
    for ours, theirs in _ALIASES.items():
        places = [at for at, name in enumerate(plain) if name in theirs]
        if len(places) > 1:
            both = " and ".join(repr(names[at]) for at in places)
            raise TraceError(path, f"columns {both} are the same, {ours}: leave one out")
        if places:
            numbers[ours] = places[0]
    missing = [name for name in REQUIRED if name not in numbers]
    if missing:
        has = ", ".join(str(name)[:40] for name in names[:20]) or "none"
        raise TraceError(path, f"columns missing: {', '.join(missing)}; it has {has}")
    return numbers


@dataclass
class Words:
    """Texts as numbers, the same over all parts and files."""

    numbers: dict[str, int] = field(default_factory=dict)

    def encoded(self, texts: Sequence[str]) -> Array:
        """-1 for an empty text."""
        number_of = self.numbers
        for text in dict.fromkeys(texts):
            if text and text not in number_of:
                number_of[text] = len(number_of)
        codes = {**number_of, "": -1}
        return np.fromiter((codes[text] for text in texts), dtype=np.int32, count=len(texts))


@dataclass(frozen=True, slots=True)
class _Source:
    path: Path
    rows: int
    line: Callable[[int], str]


@dataclass
class Builder:
    """Takes parts of tables, of one file after another, and makes one table of them."""

    unit_s: float = 1.0
    words: dict[str, Words] = field(default_factory=lambda: {name: Words() for name in TEXTS})
    parts: dict[str, list[Array]] = field(default_factory=dict)
    rows: int = 0
    sources: list[_Source] = field(default_factory=list)
    """Of each part: where it is from."""

    def add(self, path: Path, columns: Mapping[str, Array], line: Callable[[int], str]) -> None:
        """Take a part: texts as `words` encode them, numbers as floats, NaN for none.

        `line` says where in its file a row of the part is. Raises `TraceError`.
        """
        count = len(columns["rank"])
        self.rows += count
        if self.rows > MOST_ROWS:
            raise TraceError(path, f"more than {MOST_ROWS} operations: give fewer steps or files")
        self.sources.append(_Source(path, count, line))
        for name in (*_ALIASES, "gap"):
            if name == "gap":
                values = columns.get(name, np.full(count, -1, dtype=np.int32))
            elif name in columns:
                values = _checked(path, name, columns[name], line, self.unit_s)
            else:
                values = np.full(count, np.nan if name == "tokens" else -1, dtype=_kept(name))
            self.parts.setdefault(name, []).append(values)

    def table(self, path: Path) -> Operations:
        """Return the whole table. Raises `TraceError` for contradictions, or without rows."""
        if not self.rows:
            raise TraceError(path, "it has no operations")
        whole = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        self.parts.clear()
        _refuse_contradictions(self.sources, whole)
        start = whole["start"] - whole["start"].min()
        tokens = whole["tokens"]
        ranks, first = np.unique(whole["rank"], return_index=True)
        for name in (*_PLACES, "role", "host"):
            _constant(path, name, whole["rank"], whole[name], whole[name][first], ranks)
        places = {
            int(rank): Place(
                **{name: int(value) for name in _PLACES if (value := whole[name][at]) >= 0}
            )
            for rank, at in zip(ranks, first, strict=True)
        }
        are_known = any(place != Place() for place in places.values())
        return Operations(
            rank=whole["rank"], step=whole["step"], op=whole["op"], start=start,
            duration=whole["duration"], group=whole["group"], microbatch=whole["microbatch"],
            sequence=whole["sequence"],
            tokens=tokens if np.isfinite(tokens).any() else None,
            gap=whole["gap"] if (whole["gap"] >= 0).any() else None,
            ops=tuple(self.words["op"].numbers), groups=tuple(self.words["group"].numbers),
            roles=self._of_ranks("role", whole["role"][first], ranks),
            hosts=self._of_ranks("host", whole["host"][first], ranks),
            places=places if are_known else {},
        )  # fmt: skip

    def _of_ranks(self, name: str, codes: Array, ranks: Array) -> dict[int, str]:
        texts = list(self.words[name].numbers)
        pairs = zip(ranks, codes, strict=True)
        return {int(rank): texts[code] for rank, code in pairs if code >= 0}


def _refuse_contradictions(sources: Sequence[_Source], whole: Mapping[str, Array]) -> None:
    """Refuse operations of one rank and step that two files have, each in its own way.

    A table may be cut into files at any row: then one step of a rank is in two files, in parts.
    """
    paths = list(dict.fromkeys(source.path for source in sources))
    if len(paths) < 2:
        return
    file = np.repeat(
        [paths.index(source.path) for source in sources], [source.rows for source in sources]
    )
    rows = np.flatnonzero(np.isin(whole["rank"], _shared(whole["rank"], file)))
    for rank in np.unique(whole["rank"][rows]):
        mine = rows[whole["rank"][rows] == rank]
        pair = _twice(mine, file, whole)
        if pair is not None:
            first, again = pair
            (path, line), (other, place) = _where(sources, again), _where(sources, first)
            is_copy = all(whole[name][first] == whole[name][again] for name in _TIMES)
            raise TraceError(
                path,
                f"{line}: rank {rank} has step {whole['step'][again]} in {other}, {place}, too, "
                f"with {'the same' if is_copy else 'other'} times: give each rank and step once",
            )


def _shared(keys: Array, file: Array) -> Array:
    """The keys that more than one file has."""
    pairs = np.unique(np.c_[keys, file], axis=0)
    values, count = np.unique(pairs[:, 0], return_counts=True)
    shared: Array = values[count > 1]
    return shared


_MOST_SHARED_STEPS = 64


def _twice(rows: Array, file: Array, whole: Mapping[str, Array]) -> tuple[int, int] | None:
    """Two rows of one rank, in two files, for the same operation of a step; None if none are."""
    step = whole["step"]
    rows = rows[np.isin(step[rows], _shared(step[rows], file[rows]))]
    pairs: list[tuple[int, int]] = []
    for number in np.unique(step[rows])[:_MOST_SHARED_STEPS]:
        here = rows[step[rows] == number]
        identity = combined(*(whole[name][here] for name in _IDENTITY))
        common = np.isin(identity, _shared(identity, file[here]))
        if not common.any():
            continue
        here, identity = here[common], identity[common]
        first = int(here[0])
        again = int(here[(file[here] != file[first]) & (identity == identity[0])][0])
        spans = [_span(here[file[here] == number], whole) for number in (file[first], file[again])]
        pairs.append((first, again))
        if len(pairs) > 1 or (spans[0][0] < spans[1][1] and spans[1][0] < spans[0][1]):
            return pairs[0]
    return None


def _span(rows: Array, whole: Mapping[str, Array]) -> tuple[float, float]:
    start = whole["start"][rows]
    return float(start.min()), float((start + whole["duration"][rows]).max())


def _where(sources: Sequence[_Source], row: int) -> tuple[Path, str]:
    """The file of a row, and its place there."""
    for source in sources:
        if row < source.rows:
            return source.path, source.line(row)
        row -= source.rows
    raise IndexError(row)


def _kept(name: str) -> Any:
    if name in {"start", "duration", "tokens"}:
        return np.float64
    return np.int64 if name == "sequence" else np.int32


def _checked(
    path: Path, name: str, values: Array, line: Callable[[int], str], unit_s: float
) -> Array:
    if name in TEXTS:
        if name == "op":
            _refuse(path, name, values, values < 0, line, "is empty")
        return values.astype(np.int32)
    optional = name not in REQUIRED
    missing = np.isnan(values)
    if not optional:
        _refuse(path, name, values, missing, line, "is not a number")
    _refuse(path, name, values, np.isinf(values), line, "is not finite")
    missing |= optional & (values == -1)
    filled = np.where(missing, -1.0, values)
    if name in _WHOLE:
        _refuse(path, name, values, filled != np.floor(filled), line, "is not a whole number")
        _refuse(path, name, values, (filled < 0) & ~missing, line, "is negative")
        most = 2**53 if name == "sequence" else _LARGEST
        _refuse(path, name, values, filled > most, line, f"is above {most}")
        return filled.astype(_kept(name))
    if name != "start":
        _refuse(path, name, values, (filled < 0) & ~missing, line, "is negative")
    if name == "tokens":
        return np.where(missing, np.nan, values)
    scaled = values * unit_s
    if name == "duration":
        hint = f"is longer than {_LONGEST_S:g} s: is it in another unit?"
        _refuse(path, name, values, scaled > _LONGEST_S, line, hint)
    _refuse(path, name, values, np.abs(scaled) > 1e11, line, "is not a time: is its unit right?")
    return scaled.astype(np.float64)


def _refuse(
    path: Path, name: str, values: Array, bad: Array, line: Callable[[int], str], why: str
) -> None:
    if bad.any():
        row = int(np.argmax(bad))
        value = "" if name in TEXTS else f" {values[row]:.10g}"
        raise TraceError(path, f"{line(row)}: {name}{value} {why}")


def _constant(
    path: Path, name: str, rank: Array, values: Array, firsts: Array, ranks: Array
) -> None:
    differs = values != firsts[np.searchsorted(ranks, rank)]
    if differs.any():
        wrong = int(rank[int(np.argmax(differs))])
        title = f"{name} rank" if name in _PLACES else name
        raise TraceError(path, f"rank {wrong} has more than one {title}: it must stay the same")
