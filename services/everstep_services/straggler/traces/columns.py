"""Columns of a table of operations: their names, and what may stand in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from everstep_services.straggler.domain.operations import Array, Operations, Place
from everstep_services.straggler.traces.errors import TraceError

REQUIRED = ("rank", "step", "op", "start", "duration")
_ALIASES: Mapping[str, tuple[str, ...]] = {
    "group": ("group", "process_group"),
    "role": ("role",),
    "data": ("data_rank", "dp_rank", "data", "dp"),
    "pipeline": ("pipeline_rank", "pp_rank", "pipeline", "pp", "stage"),
    "tensor": ("tensor_rank", "tp_rank", "tensor", "tp"),
    "expert": ("expert_rank", "ep_rank", "expert", "ep"),
    "microbatch": ("microbatch", "micro_batch", "mb"),
    "sequence": ("sequence", "seq"),
    "tokens": ("tokens", "sequence_length", "seq_len"),
    "host": ("host", "node"),
    **{name: (name,) for name in REQUIRED},
}
TEXTS = frozenset({"op", "group", "role", "host"})
_WHOLE = frozenset(
    {"rank", "step", "data", "pipeline", "tensor", "expert", "microbatch", "sequence"}
)
_PLACES = ("data", "pipeline", "tensor", "expert")
_LARGEST = 2**31 - 2
_LONGEST_S = 1e7
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
MOST_ROWS = 50_000_000


def recognised(path: Path, names: Sequence[str]) -> dict[str, int]:
    """Where each column is that we know; others are ignored."""
    found: dict[str, int] = {}
    plain = [str(name).strip().lower().replace(" ", "_") for name in names]
    for ours, theirs in _ALIASES.items():
        places = [at for at, name in enumerate(plain) if name in theirs]
        if len(places) > 1:
            both = " and ".join(repr(names[at]) for at in places)
            raise TraceError(path, f"columns {both} are the same, {ours}: leave one out")
        if places:
            found[ours] = places[0]
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        has = ", ".join(str(name)[:40] for name in names[:20]) or "none"
        raise TraceError(path, f"columns missing: {', '.join(missing)}; it has {has}")
    return found


@dataclass
class Words:
    """Texts as numbers, the same over all parts and files."""

    numbers: dict[str, int] = field(default_factory=dict)

    def encoded(self, texts: Sequence[str]) -> Array:
        """-1 for an empty text."""
        known = self.numbers
        for text in dict.fromkeys(texts):
            if text and text not in known:
                known[text] = len(known)
        codes = {**known, "": -1}
        return np.fromiter((codes[text] for text in texts), dtype=np.int32, count=len(texts))


@dataclass
class Builder:
    """Takes parts of tables, of one file after another, and makes one table of them."""

    unit_s: float = 1.0
    words: dict[str, Words] = field(default_factory=lambda: {name: Words() for name in TEXTS})
    parts: dict[str, list[Array]] = field(default_factory=dict)
    rows: int = 0
    origin_s: float | None = None

    def add(self, path: Path, columns: Mapping[str, Array], line: Callable[[int], str]) -> None:
        """Take a part in: texts as `words` encode them, numbers as floats, NaN for none.

        `line` says where in its file a row of the part is. Raises `TraceError`.
        """
        count = len(columns["rank"])
        self.rows += count
        if self.rows > MOST_ROWS:
            raise TraceError(path, f"more than {MOST_ROWS} operations: give fewer steps or files")
        for name in _ALIASES:
            if name in columns:
                values = _checked(path, name, columns[name], line, self.unit_s)
            else:
                values = np.full(count, np.nan if name == "tokens" else -1, dtype=_kept(name))
            self.parts.setdefault(name, []).append(values)

    def table(self, path: Path) -> Operations:
        """All of it. Raises `TraceError` where ranks contradict themselves, or nothing is there."""
        if not self.rows:
            raise TraceError(path, "it has no operations")
        whole = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        self.parts.clear()
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
        known = any(place != Place() for place in places.values())
        return Operations(
            rank=whole["rank"], step=whole["step"], op=whole["op"], start=start,
            duration=whole["duration"], group=whole["group"], microbatch=whole["microbatch"],
            sequence=whole["sequence"],
            tokens=tokens if np.isfinite(tokens).any() else None,
            ops=tuple(self.words["op"].numbers), groups=tuple(self.words["group"].numbers),
            roles=self._of_ranks("role", whole["role"][first], ranks),
            hosts=self._of_ranks("host", whole["host"][first], ranks),
            places=places if known else {},
        )  # fmt: skip

    def _of_ranks(self, name: str, codes: Array, ranks: Array) -> dict[int, str]:
        texts = list(self.words[name].numbers)
        pairs = zip(ranks, codes, strict=True)
        return {int(rank): texts[code] for rank, code in pairs if code >= 0}


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
        return values.astype(np.float64)
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
        one = int(rank[int(np.argmax(differs))])
        title = f"{name} rank" if name in _PLACES else name
        raise TraceError(path, f"rank {one} has more than one {title}: it must stay the same")
