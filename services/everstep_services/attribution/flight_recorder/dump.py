"""One dump of torch's flight recorder, JSON or pickle, into a `RankSummary`."""

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from operator import itemgetter
from typing import Any

import msgspec

from everstep_services.attribution.flight_recorder.data_pickle import NotDataError, load_data
from everstep_services.attribution.flight_recorder.summary import (
    GroupRecord,
    Pending,
    RankSummary,
    State,
)

_MOST_ENTRIES = 1_000_000
_MOST_PENDING = 64
_MOST_TEXTS = 512
_MOST_DIMENSIONS = 50_000_000
_LARGEST = 2**62
_MARKS = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
"""How text begins that was written by an editor or a shell of Windows."""
_HIGHEST_RANK = 10_000_000
_SMALL = 64
"""Of how many dimensions a call is remembered, to know the next one like it at a glance."""
_KNOWN_VERSION = 2
_TRANSFER = re.compile(r"(?:.*:)?(send|recv) (\d+)(->|<-)(\d+)")
_UNEVEN_INPUTS = ("scatter", "all_to_all", "alltoall", "all_gather", "allgather", "gather")
"""Operations whose inputs may differ from rank to rank."""
_UNEVEN_OUTPUTS = ("gather", "all_to_all", "alltoall", "reduce_scatter", "reduce")
"""Operations whose outputs may."""


_SAME = (
    "profiling_name", "process_group", "pg_name", "pg_id", "input_sizes", "output_sizes",
    "input_dtypes", "output_dtypes", "is_p2p",
)  # fmt: skip
"""What entries of equal calls have in common."""
_NUMBERS = (
    "record_id", "collective_seq_id", "time_created_ns", "time_discovered_completed_ns",
    "time_discovered_started_ns", "timeout_ms", "state",
)  # fmt: skip


class BadDumpError(Exception):
    """The file is not a dump of a flight recorder; the text has the reason."""


def read_dump(content: bytes, rank: int, taken_ns: int = 0) -> RankSummary:
    """Return the summary of a rank's dump; `BadDumpError` if it is not a dump."""
    data, problems = _decoded(content)
    entries, head = _parts(data)
    version = str(head.get("version", ""))[:32]
    if not version:
        problems.append("it has no version: read as the oldest format")
    elif not version.split(".")[0].isdigit() or int(version.split(".")[0]) > _KNOWN_VERSION:
        problems.append(f"its version {version} is unknown: read as one of {_KNOWN_VERSION}.x")
    reader = _Reader(head)
    try:
        reader.take_all(entries)
        return reader.summary(rank, version, taken_ns, problems)
    finally:
        reader.forget_order()


def decoded_entries(content: bytes) -> tuple[list[Any], Mapping[str, Any]]:
    """The entries of a dump as they stand there, and what stands next to them."""
    return _parts(_decoded(content)[0])


def _decoded(content: bytes) -> tuple[Any, list[str]]:
    for mark, encoding in _MARKS.items():
        if content.startswith(mark):
            content = content.decode(encoding, "replace").lstrip("\ufeff").encode()
            break
    if content[:1] in {b"{", b"["}:
        try:
            return msgspec.json.decode(content), []
        except UnicodeDecodeError as error:
            problem = f"it is not Unicode ({error.reason} at byte {error.start} of a text)"
            data, problems = _decoded(content.decode("utf-8", "replace").encode())
            return data, [problem, *problems]
        except (msgspec.DecodeError, RecursionError) as error:
            return _salvaged(content, str(error))
    try:
        return load_data(content), []
    except NotDataError as error:
        raise BadDumpError(str(error)) from error


def _salvaged(content: bytes, why: str) -> tuple[Any, list[str]]:
    """The whole entries of a JSON dump that was cut off."""
    text = content.decode("utf-8", "replace")
    start = text.find('"entries"')
    start = text.find("[", start) if start >= 0 else -1
    entries: list[Any] = []
    decoder, at = json.JSONDecoder(), start + 1
    while start >= 0 and len(entries) < _MOST_ENTRIES:
        brace = text.find("{", at)
        if brace < 0:
            break
        try:
            entry, at = decoder.raw_decode(text, brace)
        except (ValueError, RecursionError):
            break
        entries.append(entry)
    if not entries:
        raise BadDumpError(f"it is not complete JSON, and no entry of it can be read: {why}")
    version = re.search(r'"version"\s*:\s*"([\d.]{1,16})"', text)
    head = {"entries": entries, "version": version[1] if version else ""}
    return head, [f"it is cut off: {len(entries)} entries could be read ({why})"]


def _parts(data: Any) -> tuple[list[Any], Mapping[str, Any]]:
    if isinstance(data, list):  # the first format had no head
        data = {"entries": data}
    if not isinstance(data, dict) or not isinstance(data.get("entries", []), list):
        raise BadDumpError("it has no list of entries: no dump of a flight recorder")
    if "entries" not in data and "version" not in data:
        raise BadDumpError("it has neither entries nor a version: no dump of a flight recorder")
    entries = data.get("entries", [])
    if len(entries) > _MOST_ENTRIES:
        raise BadDumpError(f"it has {len(entries)} entries; at most {_MOST_ENTRIES} are read")
    return entries, data


class _Call:
    """A call that entries repeat: what all of them have in common, read once."""

    __slots__ = (
        "_same",
        "digest",
        "group",
        "is_close",
        "is_transfer",
        "next",
        "text",
        "transfer",
        "usual",
    )

    def __init__(
        self,
        entry: Mapping[str, Any],
        group: "_Group",
        text: str,
        digest: int,
        transfer: "re.Match[str] | None",
    ) -> None:
        self._same: tuple[Any, ...] = _same(entry)
        self.usual: tuple[Any, ...] | None = None
        """The same by `_Usual.same_of`."""
        self.group = group
        self.text = text
        self.digest = digest
        self.transfer = transfer
        self.is_close = _text(entry.get("profiling_name")).endswith("coalesced")
        """Whether this is the last entry of calls that were made together."""
        self.is_transfer = transfer is not None or entry.get("is_p2p") is True
        self.next: _Call | None = None
        """The call that came after it last time: jobs repeat themselves."""

    def forget(self) -> None:
        """Recognise no other entry: comparing them would take too long."""
        self._same = ()
        self.usual = None

    def is_made_by(self, entry: Mapping[str, Any]) -> bool:
        return self._same == _same(entry)


def _same(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(entry.get, _SAME))


class _Usual:
    """Reads the fields of entries that have the same ones as a first entry."""

    __slots__ = ("_absent", "_numbers_of", "_same_of")

    def __init__(self, entry: Mapping[str, Any]) -> None:
        absent = [name for name in _SAME if name not in entry]
        self._absent = absent[0] if len(absent) == 1 else None
        self._same_of = itemgetter(*(name for name in _SAME if name in entry), _SAME[0])
        self._numbers_of = itemgetter(*_NUMBERS)

    def same(self, entry: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """What equal calls have in common; None for an entry with other fields."""
        if self._absent is None or self._absent in entry:
            return None
        try:
            return self._same_of(entry)  # type: ignore[no-any-return]
        except KeyError:
            return None

    def numbers(self, entry: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
        """Record, sequence, begin and end of an entry that is over; None where it may not be."""
        try:
            record, sequence, created, over, began, timeout_ms, state = self._numbers_of(entry)
        except KeyError:
            return None
        if began is None:
            began = 0
        if (
            state != "completed"
            or not type(record) is type(sequence) is type(created) is int
            or not type(over) is type(began) is type(timeout_ms) is int
            or not 0 <= record | sequence | created | over | began | timeout_ms < _LARGEST
            or over - (began or created) >= timeout_ms * 1_000_000
        ):
            return None
        return record, sequence, created, over


class _Reader:
    """Takes entry by entry; keeps what the analysis needs."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._config = _mapping(head.get("pg_config"))
        self._status = _mapping(head.get("pg_status"))
        self._groups: dict[str, _Group] = {}
        self._operations: dict[tuple[Any, ...], str] = {}
        self._digests: dict[str, int] = {}
        self._left = _MOST_DIMENSIONS
        self._calls: dict[tuple[str, str], _Call] = {}
        self._order: list[_Call] = []
        self._before: _Call | None = None
        self._bad = 0
        self._nameless = 0
        self._count = 0
        self._highest = -1
        self._newest_ns = 0
        self._usual: _Usual | None = None

    def take_all(self, entries: Sequence[Any]) -> None:
        for entry in entries:
            if not self._take_usual(entry):
                self.take(entry)

    def forget_order(self) -> None:
        """Take apart the circle of calls: readers do not look for circles to free."""
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
        record = _number(entry.get("record_id"), -1)
        created = _number(entry.get("time_created_ns"))
        over = _number(entry.get("time_discovered_completed_ns"))
        if record > self._highest:
            self._highest = record
        self._newest_ns = max(self._newest_ns, created, over)
        sequence = _number(entry.get("collective_seq_id", entry.get("seq_id")))
        self._take_call(call, sequence, created)
        is_part = not call.is_transfer or call.transfer is not None
        # What closes a batch of transfers stands for them all: these are listed themselves.
        if is_part and not _is_over(entry, created, over):
            call.group.take_pending(_pending(entry, sequence, call))

    def _take_call(self, call: _Call, sequence: int, created: int) -> None:
        if call.is_transfer:
            call.group.take_transfer(call.transfer, created)
        else:
            call.group.take_collective(sequence, call.digest, created)
            if call.is_close:
                call.group.take_close(sequence)

    def _call(self, entry: Mapping[str, Any]) -> _Call | None:
        """What is called; None if the entry does not tell."""
        before = self._before
        call = before.next if before is not None else None
        if call is None or not call.is_made_by(entry):
            if not _text(entry.get("profiling_name")):
                return None
            call = self._new_call(entry)
            if before is not None:
                before.next = call
        self._before = call
        return call

    def _new_call(self, entry: Mapping[str, Any]) -> _Call:
        group, text = self._group(entry), self._operation(entry)
        same_call = self._calls.get((group.name, text))
        if same_call is not None and same_call.is_made_by(entry):
            return same_call
        transfer = _TRANSFER.fullmatch(_text(entry.get("profiling_name")))
        call = _Call(entry, group, text, self._digest(text), transfer)
        self._order.append(call)
        if self._is_small(entry):
            self._usual = self._usual or _Usual(entry)
            call.usual = self._usual.same(entry)
            self._calls[group.name, text] = call
        else:
            call.forget()
        return call

    def _is_small(self, entry: Mapping[str, Any]) -> bool:
        """Whether comparing an entry to the next ones takes no time, whatever these hold."""
        shapes = [self._shape(entry.get(name)) or () for name in ("input_sizes", "output_sizes")]
        lists = [entry.get(name) for name in ("input_dtypes", "output_dtypes", "process_group")]
        texts = [values for values in lists if isinstance(values, list | tuple)]
        count = sum(len(size) + 1 for shape in shapes for size in shape) + sum(map(len, texts))
        return count <= _SMALL and all(type(value) is str for values in texts for value in values)

    def _group(self, entry: Mapping[str, Any]) -> "_Group":
        named = entry.get("process_group", entry.get("pg_name"))
        pair = named if isinstance(named, list | tuple) else (named, "")
        name = _text(pair[0]) if pair else ""
        group = self._groups.get(name)
        if group is None:
            description = _text(pair[1]) if len(pair) > 1 else ""
            number = _number(entry.get("pg_id"), -1)
            is_gloo = _text(entry.get("profiling_name")).startswith("gloo")
            group = self._groups[name] = _Group(name, description, number, is_gloo=is_gloo)
        return group

    def _operation(self, entry: Mapping[str, Any]) -> str:
        """An operation with its tensors, as text; the same few come again and again."""
        inputs, outputs = entry.get("input_sizes"), entry.get("output_sizes")
        dtypes = _dtypes(entry.get("input_dtypes")) or _dtypes(entry.get("output_dtypes"))
        key = (
            _text(entry.get("profiling_name")),
            self._shape(inputs),
            self._shape(outputs),
            dtypes,
        )
        text = self._operations.get(key)
        if text is None:
            text = self._operations[key] = self._written(key[0], inputs, outputs, dtypes)
        return text

    def _shape(self, sizes: Any) -> tuple[tuple[int, ...], ...] | None:
        """Sizes as a key; None for what is none."""
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
        lost = max(0, self._highest + 1 - self._count)
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
        )

    def _members(self, group: "_Group") -> bytes:
        ranks = _mapping(self._config.get(group.name)).get("ranks")
        if isinstance(ranks, str):
            return _listed_ranks(ranks)
        if not isinstance(ranks, list | tuple):
            return b""
        return _packed_ranks([_number(rank, -1) for rank in ranks])

    def _status_of(self, group: "_Group") -> Mapping[str, Any]:
        return _mapping(self._status.get(str(group.id), self._status.get(group.id)))


class _Group:
    """One process group of one rank, while its entries are read."""

    def __init__(self, name: str, description: str, number: int, *, is_gloo: bool) -> None:
        self.name = name
        self.id = number
        self._description = description
        self._calls: dict[int, int] = {}
        self._together: set[int] = set()
        self._pending: list[Pending] = []
        self._unlisted = 0
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        self._before_ns = 0
        self._longest_ns = 0
        self._knows_starts = False
        self._is_gloo = is_gloo

    def take_collective(self, sequence: int, digest: int, created_ns: int) -> None:
        before = self._calls.get(sequence)
        # One sequence number may stand for several calls that were made together.
        self._calls[sequence] = digest if before is None else (before * 31 + digest) % _LARGEST
        self._take_time(created_ns)

    def take_close(self, sequence: int) -> None:
        self._together.add(sequence)

    def _take_time(self, created_ns: int) -> None:
        gap_ns = created_ns - self._before_ns
        if gap_ns > 0:
            if gap_ns > self._longest_ns and self._before_ns:
                self._longest_ns = gap_ns
            self._before_ns = created_ns

    def take_transfer(self, transfer: "re.Match[str] | None", created_ns: int) -> None:
        self._take_time(created_ns)
        if transfer is not None:
            counts = self._sends if transfer[1] == "send" else self._receives
            peer = int(transfer[4])
            counts[peer] = counts.get(peer, 0) + 1

    def _counts_collectives_only(self) -> bool:
        """Whether a status has the numbers of collectives; some also count transfers."""
        return not (self._sends or self._receives or self._is_gloo)

    def take_pending(self, pending: Pending) -> None:
        self._knows_starts |= pending.state != "scheduled"
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(pending)

    def record(self, members: bytes, status: Mapping[str, Any], *, is_cut: bool) -> GroupRecord:
        numbers = sorted(self._calls)
        first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
        if is_cut and first in self._together:
            self._calls[first] = 0  # the ring may have lost a part of what was made together
        is_dense = last - first < 4 * len(numbers) + 64
        span = range(first, last + 1) if is_dense else range(last, last + 1)
        oldest = min(
            (call.sequence for call in self._pending if call.peer is None), default=last + 1
        )
        if not self._counts_collectives_only():
            status = {}
        completed = _number(status.get("last_completed_collective"), -1)
        has_status = completed >= 0
        if not has_status or (numbers and first <= completed + 1):
            # The ring has all that the status does not tell of, and a status is written later.
            completed = max(completed, oldest - 1)
        return GroupRecord(
            name=self.name,
            description=self._description,
            members=members,
            first=span.start if numbers else 0,
            calls=array("Q", (self._calls.get(n, 0) for n in span)).tobytes() if numbers else b"",
            enqueued=max(last, _number(status.get("last_enqueued_collective"), 0)),
            completed=completed,
            has_status=has_status,
            pending=tuple(self._pending),
            sends=tuple(sorted(self._sends.items())),
            receives=tuple(sorted(self._receives.items())),
            longest_gap_ns=self._longest_ns,
            knows_starts=self._knows_starts
            or _number(status.get("last_started_collective"), -1) >= 0,
        )


@lru_cache(maxsize=64)
def _listed_ranks(text: str) -> bytes:
    """The ranks of `[0, 1, 2]`; each rank of a group writes the same."""
    if not re.fullmatch(r"[\[\]0-9, ]*", text):
        return b""
    return _packed_ranks([int(rank) for rank in re.findall(r"\d{1,9}", text)])


def _packed_ranks(ranks: Sequence[int]) -> bytes:
    is_sane = all(0 <= rank <= _HIGHEST_RANK for rank in ranks)
    return array("I", ranks).tobytes() if is_sane else b""


def _is_over(entry: Mapping[str, Any], created: int, over: int) -> bool:
    """Whether an entry is over. gloo's never leave `scheduled`, and are then only retired."""
    if entry.get("state") == "completed":
        began = _number(entry.get("time_discovered_started_ns")) or created
        # Some releases record a collective as completed when it was given up.
        timeout_ns = _number(entry.get("timeout_ms")) * 1_000_000
        return not (timeout_ns and over and began and over - began >= timeout_ns)
    is_retired = entry.get("retired") is True
    return is_retired and _text(entry.get("profiling_name")).startswith("gloo")


def _pending(entry: Mapping[str, Any], sequence: int, call: _Call) -> Pending:
    state: State = "started" if entry.get("state") == "started" else "scheduled"
    transfer = call.transfer
    return Pending(
        sequence=sequence,
        operation=readable(call.text),
        state=state,
        created_ns=_number(entry.get("time_created_ns")),
        timeout_ms=_number(entry.get("timeout_ms")),
        peer=int(transfer[4]) if transfer else None,
        is_send=bool(transfer and transfer[1] == "send"),
        where=_where(entry.get("frames")),
    )


def readable(text: str) -> str:
    """An operation as people read it: `all_reduce of 4x3 Float`."""
    name, sizes, outputs, dtypes = [*text.split("|"), "", "", ""][:4]
    kind = (name.partition(":")[2] or name).strip("_")
    tensors = sizes if len(sizes) <= 60 else f"{sizes[:57]}..."
    to = f" to {outputs if len(outputs) <= 60 else outputs[:57] + '...'}" if outputs else ""
    return f"{kind} of {tensors}{to} {dtypes}".rstrip() if tensors else kind


def _where(frames: Any) -> str:
    """The innermost line that is not torch's own."""
    if not isinstance(frames, list | tuple):
        return ""
    for frame in frames[:64]:
        name = _mapping(frame)
        file = _text(name.get("filename"))
        if file and "/torch/" not in file and "torch/csrc" not in file:
            return f"{file[-120:]}:{_number(name.get('line'))} in {_text(name.get('name'))[:80]}"
    return ""


def _dtypes(dtypes: Any) -> str:
    if not isinstance(dtypes, list | tuple):
        return ""
    if len(dtypes) == 1:
        return _text(dtypes[0])[:24]
    return "+".join(sorted({_text(dtype)[:24] for dtype in dtypes[:256]}))


def _mapping(value: Any) -> Mapping[Any, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value[:512]
    return str(value) if isinstance(value, int) and abs(value) < _LARGEST else ""


def _number(value: Any, default: int = 0) -> int:
    """A number of a dump, whole and of a sane size; some releases write them as strings."""
    if type(value) is int and -_LARGEST < value < _LARGEST:
        return value
    if isinstance(value, str) and len(value) < 20 and value.lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, float) and abs(value) < _LARGEST:
        value = int(value)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and abs(value) < _LARGEST else default
