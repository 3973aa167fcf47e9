"""One dump of torch's flight recorder into a `RankSummary`."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from everstep_services.attribution.flight_recorder.calls import (
    GroupReader,
    RecordedCall,
    UsualFields,
)
from everstep_services.attribution.flight_recorder.dump_file import BadDumpError, decoded, parts_of
from everstep_services.attribution.flight_recorder.fields import (
    dtypes_of,
    is_over,
    listed_ranks,
    mapping_of,
    number_of,
    packed_ranks,
    readable,
    text_of,
    where,
)
from everstep_services.attribution.flight_recorder.summary import Pending, RankSummary, State

_MOST_TEXTS = 512
_MOST_DIMENSIONS = 50_000_000
_BACKENDS = ("nccl", "ncclx", "rccl", "rcclx", "gloo", "xccl", "hccl")
"""The backends of torchcomms."""
_TRANSFERS = ("send", "recv", "batch_op")
_SMALL = 64
"""Of how many dimensions a call is remembered, to know the next one like it at a glance."""
_KNOWN_VERSION = 2
_TRANSFER = re.compile(r"(?:.*:)?(send|recv) (\d+)(->|<-)(\d+)")
_UNEVEN_INPUTS = ("scatter", "all_to_all", "alltoall", "all_gather", "allgather", "gather")
"""Operations whose inputs may differ from rank to rank."""
_UNEVEN_OUTPUTS = ("gather", "all_to_all", "alltoall", "reduce_scatter", "reduce")
"""Operations whose outputs may."""


def read_dump(content: bytes, rank: int, taken_ns: int = 0) -> RankSummary:
    """Return the summary of a rank's dump; `BadDumpError` if it is not a dump."""
    data, problems = decoded(content)
    entries, head = parts_of(data)
    version = text_of(str(head.get("version", "")))[:32]
    is_partial = bool(problems) or (not entries and not _is_known(version))
    if not version:
        problems.append("it has no version: read as the oldest format")
    elif not _is_known(version):
        problems.append(f"its version {version} is unknown: read as one of {_KNOWN_VERSION}.x")
    numbered = _numbered_by_group(entries)
    if numbered is not entries:
        head = {**head, "pg_status": {}}  # nobody documents what its statuses count
    reader = _Reader(head)
    try:
        reader.take_all(numbered)
        summary = reader.summary(rank, version, taken_ns, problems)
    finally:
        reader.forget_order()
    return msgspec.structs.replace(summary, is_partial=True) if is_partial else summary


def _numbered_by_group(entries: Sequence[Any]) -> Sequence[Any]:
    """The entries; those of torchcomms with numbers that count the calls of a group.

    Its recorder numbers the calls of all groups together, takes no call for a transfer, and has
    the backend in place of a group's description. Where it has overwritten calls, or only lists
    some, the numbers in the groups are unknown.
    """
    if not entries or not all(map(_is_of_torchcomms, entries)):
        return entries
    records = [number_of(entry.get("record_id"), -1) for entry in entries]
    first = number_of(entries[0].get("collective_seq_id")) - records[0]
    if any(
        number_of(entry.get("collective_seq_id")) - record != first
        for entry, record in zip(entries, records, strict=True)
    ):
        return entries
    is_whole = records == [*range(len(records))]
    counts: Counter[str] = Counter()
    numbered = []
    for entry in entries:
        name = text_of(entry.get("profiling_name")).rpartition(":")[2]
        is_transfer = name.startswith(_TRANSFERS)
        group = text_of(entry["process_group"][0])
        counts[group] += not is_transfer
        number = counts[group] if is_whole else -1
        numbered.append(entry | {"collective_seq_id": number, "is_p2p": is_transfer})
    return numbered


def _is_of_torchcomms(entry: Any) -> bool:
    group = entry.get("process_group") if isinstance(entry, dict) else None
    return (
        isinstance(group, list | tuple)
        and len(group) == 2
        and group[1] in _BACKENDS
        and entry.get("p2p_seq_id") == 0
    )


def _is_known(version: str) -> bool:
    major = version.partition(".")[0]
    return major.isdecimal() and int(major) <= _KNOWN_VERSION


class _Reader:
    """Takes the entries one by one; keeps only data that the analysis needs."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._config = mapping_of(head.get("pg_config"))
        self._status = mapping_of(head.get("pg_status"))
        self._groups: dict[str, GroupReader] = {}
        self._operations: dict[tuple[Any, ...], str] = {}
        self._digests: dict[str, int] = {}
        self._left = _MOST_DIMENSIONS
        self._calls: dict[tuple[str, str], RecordedCall] = {}
        self._order: list[RecordedCall] = []
        self._before: RecordedCall | None = None
        self._bad = 0
        self._nameless = 0
        self._unnumbered = 0
        self._count = 0
        self._highest = -1
        self._newest_ns = 0
        self._usual: UsualFields | None = None

    def take_all(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if not self._take_usual(entry):
                self.take(entry)

    def forget_order(self) -> None:
        """Break the circle of calls: readers run without the garbage collector."""
        for call in self._order:
            call.next = None

    def _take_usual(self, entry: Any) -> bool:
        """Take an entry that is over and repeats the call that came next before, as most do.

        It does what `take` does, in half the time.
        """
        before, usual = self._before, self._usual
        call = before.next if before is not None else None
        if call is None or call.usual is None or usual is None or type(entry) is not dict:
            return False
        numbers = usual.numbers(entry) if usual.same(entry) == call.usual else None
        if numbers is None:
            return False
        record, sequence, created, over = numbers
        self._before = call
        self._count += 1
        if record > self._highest:
            self._highest = record
        if self._newest_ns < over:
            self._newest_ns = over
        if self._newest_ns < created:
            self._newest_ns = created
        self._take_call(call, sequence, created)
        return True

    def take(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            self._bad += 1
            return
        call = self._call(entry)
        if call is None:
            self._nameless += 1
            return
        self._count += 1
        record = number_of(entry.get("record_id"), -1)
        created = number_of(entry.get("time_created_ns"))
        over = number_of(entry.get("time_discovered_completed_ns"))
        if record > self._highest:
            self._highest = record
        self._newest_ns = max(self._newest_ns, created, over)
        sequence = number_of(entry.get("collective_seq_id", entry.get("seq_id")))
        self._take_call(call, sequence, created)
        is_part = not call.is_transfer or call.transfer is not None
        # The closing entry of a batch stands for its transfers, which have entries themselves.
        if not is_part or is_over(entry, created, over):
            return
        if sequence < 0 and not call.is_transfer:
            self._unnumbered += 1  # of two ranks, these may be different calls
        else:
            call.group.take_pending(_pending(entry, sequence, call))

    def _take_call(self, call: RecordedCall, sequence: int, created: int) -> None:
        if call.is_transfer:
            call.group.take_transfer(call.transfer, created)
        elif sequence >= 0:  # what the agent has made -1 counts the calls of all groups
            call.group.take_collective(sequence, call.digest, created)
            if call.is_close:
                call.group.take_close(sequence)

    def _call(self, entry: Mapping[str, Any]) -> RecordedCall | None:
        """The call of an entry; None if the entry has no name."""
        before = self._before
        call = before.next if before is not None else None
        if call is None or not call.is_made_by(entry):
            if not text_of(entry.get("profiling_name")):
                return None
            call = self._new_call(entry)
            if before is not None:
                before.next = call
        self._before = call
        return call

    def _new_call(self, entry: Mapping[str, Any]) -> RecordedCall:
        group, text = self._group(entry), self._operation(entry)
        same_call = self._calls.get((group.name, text))
        if same_call is not None and same_call.is_made_by(entry):
            return same_call
        transfer = _TRANSFER.fullmatch(text_of(entry.get("profiling_name")))
        call = RecordedCall(entry, group, text, self._digest(text), transfer)
        self._order.append(call)
        if self._is_small(entry):
            self._usual = self._usual or UsualFields(entry)
            call.usual = self._usual.same(entry)
            self._calls[group.name, text] = call
        else:
            call.forget()
        return call

    def _is_small(self, entry: Mapping[str, Any]) -> bool:
        """Whether comparing an entry with later ones is cheap, whatever these hold."""
        shapes = [self._shape(entry.get(name)) or () for name in ("input_sizes", "output_sizes")]
        lists = [entry.get(name) for name in ("input_dtypes", "output_dtypes", "process_group")]
        texts = [values for values in lists if isinstance(values, list | tuple)]
        count = sum(len(size) + 1 for shape in shapes for size in shape) + sum(map(len, texts))
        return count <= _SMALL and all(type(value) is str for values in texts for value in values)

    def _group(self, entry: Mapping[str, Any]) -> GroupReader:
        named = entry.get("process_group", entry.get("pg_name"))
        pair = named if isinstance(named, list | tuple) else (named, "")
        name = text_of(pair[0]) if pair else ""
        group = self._groups.get(name)
        if group is None:
            description = text_of(pair[1]) if len(pair) > 1 else ""
            number = number_of(entry.get("pg_id"), -1)
            is_gloo = text_of(entry.get("profiling_name")).startswith("gloo")
            group = self._groups[name] = GroupReader(name, description, number, is_gloo=is_gloo)
        return group

    def _operation(self, entry: Mapping[str, Any]) -> str:
        """An operation with its tensors, as text; the same few come again and again."""
        inputs, outputs = entry.get("input_sizes"), entry.get("output_sizes")
        dtypes = dtypes_of(entry.get("input_dtypes")) or dtypes_of(entry.get("output_dtypes"))
        key = (
            text_of(entry.get("profiling_name")),
            self._shape(inputs),
            self._shape(outputs),
            dtypes,
        )
        text = self._operations.get(key)
        if text is None:
            text = self._operations[key] = self._written(key[0], inputs, outputs, dtypes)
        return text

    def _shape(self, sizes: Any) -> tuple[tuple[int, ...], ...] | None:
        """Sizes as a key; None for a value that is not a list."""
        if not isinstance(sizes, list | tuple):
            return None
        shape: list[tuple[int, ...]] = []
        for size in sizes:
            is_size = isinstance(size, list | tuple) and set(map(type, size)) <= {int}
            shape.append(tuple(size) if is_size else (-1,))
            self._left -= len(shape[-1])
            if self._left < 0:
                raise BadDumpError("its entries have more sizes of tensors than a recorder holds")
        return tuple(shape)

    def _written(self, name: str, inputs: Any, outputs: Any, dtypes: str) -> str:
        kind = (name.partition(":")[2] or name).removeprefix("_").lower()
        into = "" if kind.startswith(_UNEVEN_INPUTS) else self._sizes(inputs)
        out = "" if kind.startswith(_UNEVEN_OUTPUTS) else self._sizes(outputs)
        return "|".join((name, into or out, out if out != into else "", dtypes))

    def _sizes(self, sizes: Any) -> str:
        return "+".join("x".join(map(str, size)) for size in self._shape(sizes) or ())

    def _digest(self, text: str) -> int:
        digest = self._digests.get(text)
        if digest is None:
            digest = int.from_bytes(
                blake2b(text.encode("utf-8", "replace"), digest_size=7).digest()
            )
            self._digests[text] = digest
        return digest

    def summary(self, rank: int, version: str, taken_ns: int, problems: list[str]) -> RankSummary:
        if self._bad:
            problems.append(f"{self._bad} invalid entries were left out")
        if self._nameless:
            problems.append(f"{self._nameless} entries without an operation were left out")
        if self._unnumbered:
            problems.append(
                f"{self._unnumbered} calls that are not over were left out: torchcomms does not "
                "number them by group, and earlier calls are missing"
            )
        lost = max(0, self._highest + 1 - self._count)
        self._add_quiet_groups()
        texts = [(digest, text) for text, digest in self._digests.items()]
        return RankSummary(
            rank=rank,
            version=version,
            newest_ns=self._newest_ns,
            taken_ns=taken_ns,
            entries=self._count,
            lost=lost,
            groups=tuple(
                group.record(self._members(group), self._status_of(group), is_cut=lost > 0)
                for group in self._groups.values()
            ),
            texts=tuple(texts[-_MOST_TEXTS:]),
            problems=tuple(problems),
            is_partial=bool(self._bad or self._nameless or self._unnumbered),
        )

    def _add_quiet_groups(self) -> None:
        """Add the groups that have a status and no entry: all that they were called for is over.

        A status has the number of its group, and a list of ranks has the name; both count groups
        in the order in which they were made.
        """
        numbers = sorted(number_of(number, -1) for number in self._status)
        names = [text_of(name) for name in self._config]
        if len(names) != len(numbers) or not all(map(str.isdecimal, names)):
            return
        pairs = dict(zip(sorted(names, key=int), numbers, strict=True))
        if any(pairs.get(group.name) != group.id for group in self._groups.values()):
            return
        for name in names:
            if name not in self._groups:
                description = text_of(mapping_of(self._config[name]).get("desc"))
                self._groups[name] = GroupReader(name, description, pairs[name], is_gloo=False)

    def _members(self, group: GroupReader) -> bytes:
        ranks = mapping_of(self._config.get(group.name)).get("ranks")
        if isinstance(ranks, str):
            return listed_ranks(ranks)
        if not isinstance(ranks, list | tuple):
            return b""
        return packed_ranks([number_of(rank, -1) for rank in ranks])

    def _status_of(self, group: GroupReader) -> Mapping[str, Any]:
        return mapping_of(self._status.get(str(group.id), self._status.get(group.id)))


def _pending(entry: Mapping[str, Any], sequence: int, call: RecordedCall) -> Pending:
    state: State = "started" if entry.get("state") == "started" else "scheduled"
    transfer = call.transfer
    return Pending(
        sequence=sequence,
        operation=readable(call.text),
        state=state,
        created_ns=number_of(entry.get("time_created_ns")),
        peer=int(transfer[4]) if transfer else None,
        is_send=bool(transfer and transfer[1] == "send"),
        where=where(entry.get("frames")),
    )
