"""The entries of dumps side by side, one column a rank, as `torchfrtrace` prints them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgspec

from everstep_services.attribution.flight_recorder.dump_file import decoded_entries

_LONGEST = 400
_TRANSFERS = {"send": "->", "recv": "<-"}


class RecorderEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a ring, in words."""

    record: int
    group: str
    """The name of its process group."""
    description: str
    text: str
    stack: str = ""


class RankEntries(msgspec.Struct, frozen=True, kw_only=True):
    """All entries of one dump, the oldest first."""

    rank: int
    entries: tuple[RecorderEntry, ...]


def read_entries(content: bytes, rank: int, *, verbose: bool, group_world: int = 0) -> RankEntries:
    """Return the entries of a dump; `BadDumpError` if it is not a dump.

    With `group_world`, a replica group of torchft has this number of ranks, and transfers of its
    default group are between global ranks.
    """
    entries, head = decoded_entries(content)
    groups = head.get("pg_config")
    listed = groups if isinstance(groups, dict) else {}
    first = rank // group_world * group_world if group_world else 0
    return RankEntries(
        rank=rank,
        entries=tuple(
            _entry(entry, listed, first, verbose=verbose)
            for entry in entries
            if isinstance(entry, dict)
        ),
    )


def table(
    dumps: Sequence[RankEntries], ranks: Collection[int] = (), groups: Collection[str] = ()
) -> tuple[list[int], list[list[str]]]:
    """The ranks and rows: an entry is in the row of its place after the newest first entry of all.

    An entry of another process group leaves its place empty.
    """
    start = max((dump.entries[0].record for dump in dumps if dump.entries), default=0)
    shown = sorted(
        (dump for dump in dumps if not ranks or dump.rank in ranks), key=lambda dump: dump.rank
    )
    columns = [
        [
            entry.text if not groups or {entry.group, entry.description} & {*groups} else ""
            for entry in dump.entries
            if entry.record >= start
        ]
        for dump in shown
    ]
    rows = [list(row) for row in zip_longest(*columns, fillvalue="")]
    return [dump.rank for dump in shown], rows


def stacks(dumps: Sequence[RankEntries]) -> list[str]:
    """The different stacks, in the order of ranks and entries."""
    ordered = sorted(dumps, key=lambda dump: dump.rank)
    return list(dict.fromkeys(e.stack for dump in ordered for e in dump.entries if e.stack))


def lines(ranks: Sequence[int], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table for people."""
    named = [f"Rank {rank}" for rank in ranks]
    widths = [max(map(len, column)) for column in zip(named, *rows, strict=True)]
    for row in (named, ["-" * width for width in widths], *rows):
        yield "  ".join(map(str.ljust, row, widths)).rstrip()


def _entry(
    entry: Mapping[str, Any], groups: Mapping[str, Any], first: int, *, verbose: bool
) -> RecorderEntry:
    named = entry.get("process_group", ("", ""))
    pair = [*map(str, named), "", ""] if isinstance(named, list | tuple) else [str(named), ""]
    kind, _, ends = str(entry.get("profiling_name", "")).partition(":")[2].partition(" ")
    transfer = _ends(kind, ends, groups.get(pair[0]), first if pair[1] == "default_pg" else 0)
    sizes = None if kind == "coalesced" else entry.get("input_sizes")
    parts = [transfer, f"input_sizes={sizes}", f"state={entry.get('state')}"]
    if verbose:
        number = entry.get("p2p_seq_id" if transfer else "collective_seq_id")
        outputs = None if kind == "coalesced" else entry.get("output_sizes")
        parts = [
            f"timestamp_created={entry.get('time_created_ns')}", transfer, f"input_sizes={sizes}",
            f"output_sizes={outputs}", f"input_dtypes={entry.get('input_dtypes')}",
            f"output_dtypes={entry.get('output_dtypes')}",
            f"collective_seq_id | p2p_seq_id={number}", f"pg_name={pair[0]}",
            f"pg_description={pair[1]}", f"state={entry.get('state')}",
        ]  # fmt: skip
    record, frames = entry.get("record_id"), entry.get("frames")
    return RecorderEntry(
        record=record if type(record) is int and abs(record) < 2**62 else 0,
        group=pair[0][:_LONGEST],
        description=pair[1][:_LONGEST],
        text=f"{kind}({', '.join(part for part in parts if part)})"[:_LONGEST],
        stack="; ".join(map(_frame, frames[:64])) if isinstance(frames, list | tuple) else "",
    )


def _frame(frame: Any) -> str:
    if not isinstance(frame, dict):
        return "?"
    return f"{frame.get('name')} at {frame.get('filename')}:{frame.get('line')}"[:_LONGEST]


def _ends(kind: str, ends: str, group: Any, first: int) -> str:
    """The global ranks of a transfer's ends, as `s=0 d=1`; empty for a collective."""
    own, _, other = ends.partition(_TRANSFERS.get(kind, "\0"))
    if not (own.isdecimal() and other.isdecimal() and len(own + other) < 16):
        return ""
    listed = group.get("ranks") if isinstance(group, dict) else None
    text = listed if isinstance(listed, str) else ""
    members = sorted(int(rank) + first for rank in text.strip("[]").split(",") if _is_rank(rank))
    ranks = [members[at] if at < len(members) else at for at in (int(own), int(other))]
    source, target = ranks if kind == "send" else reversed(ranks)
    return f"s={source} d={target}"


def _is_rank(text: str) -> bool:
    return text.strip().isdecimal() and len(text.strip()) < 8
