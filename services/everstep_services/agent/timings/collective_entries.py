"""When a rank entered collectives, read from torch's flight recorder for gloo and NCCL."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import msgspec

from everstep.messages import CollectiveEntries

MOST = 64
"""The most collectives of a rank in a window, and the most transfers."""
_READ = 4 * MOST
"""The number of latest entries that are read: some of them are later than the window."""
_MOST_MEMBERS = 64
_MOST_SIZE = 128
_MOST_COUNT, _MOST_NS, _MOST_MS = 1 << 53, 1 << 62, 1e9
_FIRST_KEY = b'{"collective_seq_id":'
_WITHOUT_SECTION = -1


class _Entry(msgspec.Struct):
    collective_seq_id: int = -1
    p2p_seq_id: int = -1
    is_p2p: bool = False
    process_group: tuple[str, ...] = ()
    profiling_name: str = ""
    input_sizes: tuple[tuple[int, ...], ...] = ()
    time_created_ns: int = 0
    record_id: int = -1
    duration_ms: float | None = None


class _Group(msgspec.Struct):
    ranks: str = ""


class _Trace(msgspec.Struct):
    entries: list[_Entry] = []
    pg_config: Mapping[str, _Group] = {}


@dataclass(frozen=True, slots=True)
class CollectiveEntry:
    """A rank has entered a collective, or has begun to send or to receive."""

    group: str
    sequence: int
    op: str
    at_s: float
    """The instant by the host's wall clock."""
    lasted_s: float | None = None
    """The duration on the device, where that is recorded."""
    is_transfer: bool = False
    """A transfer between two ranks; its sequence is the rank's own."""


@dataclass(frozen=True, slots=True)
class Recording:
    """The contents of one rank's recorder: the latest entries, ordered by their instants."""

    entries: tuple[CollectiveEntry, ...]
    members: Mapping[str, tuple[int, ...]]
    """The ranks of a group, where that is recorded."""


def parse_recording(bodies: Sequence[bytes]) -> Recording | None:
    """Parse the traces of a rank's flight recorders; None if one is not a trace.

    Both ends of a transfer between two ranks number it differently, so only transfers with a
    duration are kept.
    """
    decoded = [_decoded(_latest(body)) or _decoded(body) for body in bodies]
    traces = [trace for trace in decoded if trace is not None]
    if len(traces) < len(bodies):
        return None
    entries = [
        CollectiveEntry(
            group=_group(entry),
            sequence=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
            op=_op(entry),
            at_s=entry.time_created_ns / 1e9,
            lasted_s=None if entry.duration_ms is None else entry.duration_ms / 1e3,
            is_transfer=entry.is_p2p,
        )
        for trace in traces
        for entry in trace.entries[-_READ:]
        if _is_good(entry)
    ]
    entries.sort(key=lambda item: item.at_s)
    members = {group: ranks for trace in traces for group, ranks in _members(trace).items()}
    return Recording(tuple(entries), members)


def within(recording: Recording, starts_s: float, ends_s: float) -> tuple[CollectiveEntry, ...]:
    """The latest entries of a window, by the host's wall clock.

    All kinds begin at one instant: a reader without the transfers would take waits for work.
    """
    left = {False: MOST, True: MOST}
    entries: list[CollectiveEntry] = []
    for entry in reversed(recording.entries):
        if entry.at_s <= starts_s or not left[entry.is_transfer]:
            break
        if entry.at_s <= ends_s:
            left[entry.is_transfer] -= 1
            entries.append(entry)
    return tuple(reversed(entries))


def collectives(
    entries: Sequence[CollectiveEntry],
    members: Mapping[str, tuple[int, ...]],
    section: Callable[[CollectiveEntry], int] | None = None,
) -> tuple[float, tuple[CollectiveEntries, ...]]:
    """The start of the window, and the entries by group and unbroken sequence.

    `section` returns the rank's section at each instant; None without sections.
    """
    from_s = min((entry.at_s for entry in entries), default=0.0)
    by_group: dict[tuple[str, bool], list[CollectiveEntry]] = {}
    for item in entries:
        by_group.setdefault((item.group, item.is_transfer), []).append(item)
    return from_s, tuple(
        _series(run, from_s, members.get(group, ()), section)
        for (group, _), of_group in sorted(by_group.items())
        for run in _unbroken(of_group)
    )


def _series(
    run: Sequence[CollectiveEntry],
    from_s: float,
    members: tuple[int, ...],
    section: Callable[[CollectiveEntry], int] | None,
) -> CollectiveEntries:
    ops = tuple(dict.fromkeys(entry.op for entry in run))
    lasted = [-1.0 if entry.lasted_s is None else entry.lasted_s for entry in run]
    sections = () if section is None else tuple(section(entry) for entry in run)
    return CollectiveEntries(
        group=run[0].group,
        first_sequence=run[0].sequence,
        entered_us=tuple(round((entry.at_s - from_s) * 1e6) for entry in run),
        ops=ops,
        op=tuple(ops.index(entry.op) for entry in run),
        section=sections if any(section != _WITHOUT_SECTION for section in sections) else (),
        lasted_us=tuple(round(entry * 1e6) if entry >= 0 else -1 for entry in lasted)
        if max(lasted) >= 0
        else (),
        members=members,
        are_transfers=run[0].is_transfer,
    )


def _unbroken(entries: Iterable[CollectiveEntry]) -> Iterable[list[CollectiveEntry]]:
    """Split where a number of the sequence is missing; a repeated number counts once."""
    by_number = {entry.sequence: entry for entry in entries}
    numbered = [by_number[number] for number in sorted(by_number)]
    breaks = [0]
    for before, after in pairwise(numbered):
        breaks.append(breaks[-1] + (after.sequence != before.sequence + 1))
    pairs = zip(breaks, numbered, strict=False)
    for _, run in groupby(pairs, key=lambda pair: pair[0]):
        yield [item for _, item in run]


def _latest(body: bytes) -> bytes:
    """The trace with only its latest entries: for a full ring that is a megabyte less."""
    at = len(body)
    for _ in range(_READ):
        earlier = body.rfind(_FIRST_KEY, 0, at)
        if earlier < 0:
            break
        at = earlier
    return b'{"entries":[' + body[at:]


def _decoded(body: bytes) -> _Trace | None:
    try:
        return _TRACE.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None  # a sick rank may write anything


def _is_good(entry: _Entry) -> bool:
    """Whether an entry shows a wait, and its numbers fit the message."""
    lasted_ms = entry.duration_ms or 0.0
    sequence = entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id
    return (
        not (entry.is_p2p and entry.duration_ms is None)
        and 0 <= sequence < _MOST_COUNT
        and 0 < entry.time_created_ns < _MOST_NS
        and 0 <= lasted_ms < _MOST_MS
    )


def _group(entry: _Entry) -> str:
    """The number that torch gives the group, and its description, if it has one."""
    name, *more = entry.process_group or ("",)
    described = [item for item in more if item not in {"", "undefined"}]
    return " ".join([name, *described])[:_MOST_SIZE]


def _op(entry: _Entry) -> str:
    name = entry.profiling_name.rpartition(":")[2].partition(" ")[0] or "collective"
    count = 0
    for sizes in entry.input_sizes:
        elements = 1
        for size in sizes:
            elements = min(elements * max(size, 0), _MOST_COUNT)
        count = min(count + elements, _MOST_COUNT)
    return f"{name} {count}"[:_MOST_SIZE]


def _members(trace: _Trace) -> dict[str, tuple[int, ...]]:
    """The members of groups that are small enough to be sent each time."""
    members = {}
    for entry in trace.entries:
        group = entry.process_group[0] if entry.process_group else ""
        config = trace.pg_config.get(group)
        if config is None or _group(entry) in members:
            continue
        try:
            ranks = _RANKS.decode(config.ranks)
        except (msgspec.MsgspecError, ValueError):
            continue
        if 0 < len(ranks) <= _MOST_MEMBERS and all(0 <= rank < _MOST_COUNT for rank in ranks):
            members[_group(entry)] = ranks
    return members


_TRACE = msgspec.json.Decoder(_Trace, strict=False)  # some releases write numbers as strings
_RANKS = msgspec.json.Decoder(tuple[int, ...])
