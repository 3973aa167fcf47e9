"""One dump of torch's flight recorder, JSON or pickle, into a `RankSummary`."""

import json
import re
from array import array
from collections.abc import Mapping
from hashlib import blake2b
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
_KNOWN_VERSION = 2
_TRANSFER = re.compile(r"(?:.*:)?(send|recv) (\d+)(->|<-)(\d+)")
_UNEVEN_INPUTS = ("scatter", "all_to_all", "alltoall", "all_gather", "allgather", "gather")
"""Operations whose inputs may differ from rank to rank."""
_UNEVEN_OUTPUTS = ("gather", "all_to_all", "alltoall", "reduce_scatter", "reduce")
"""Operations whose outputs may."""


class BadDumpError(Exception):
    """A file that is no dump of a flight recorder; says why."""


def read_dump(content: bytes, rank: int, taken_ns: int = 0) -> RankSummary:
    """What a dump says of its rank. Raises `BadDumpError` for what is no dump."""
    data, problems = _decoded(content)
    entries, head = _parts(data)
    version = str(head.get("version", ""))[:32]
    if not version:
        problems.append("it has no version: read as the oldest format")
    elif not version.split(".")[0].isdigit() or int(version.split(".")[0]) > _KNOWN_VERSION:
        problems.append(f"its version {version} is unknown: read as one of {_KNOWN_VERSION}.x")
    reader = _Reader(head)
    for entry in entries:
        reader.take(entry)
    return reader.summary(rank, version, taken_ns, problems)


def _decoded(content: bytes) -> tuple[Any, list[str]]:
    if content[:1] in {b"{", b"["}:
        try:
            return msgspec.json.decode(content), []
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
        raise BadDumpError(f"it is no whole JSON, and no entry of it can be read: {why}")
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


class _Reader:
    """Takes entry by entry; keeps what the analysis needs."""

    def __init__(self, head: Mapping[str, Any]) -> None:
        self._config = _mapping(head.get("pg_config"))
        self._status = _mapping(head.get("pg_status"))
        self._groups: dict[str, _Group] = {}
        self._operations: dict[tuple[Any, ...], str] = {}
        self._digests: dict[str, int] = {}
        self._left = _MOST_DIMENSIONS
        self._bad = 0
        self._nameless = 0
        self._count = 0
        self._highest = -1
        self._newest_ns = 0

    def take(self, entry: Any) -> None:
        if not isinstance(entry, dict):
            self._bad += 1
            return
        if not _text(entry.get("profiling_name")):
            self._nameless += 1
            return
        self._count += 1
        self._highest = max(self._highest, _number(entry.get("record_id"), -1))
        created = _number(entry.get("time_created_ns"))
        over = _number(entry.get("time_discovered_completed_ns"))
        self._newest_ns = max(self._newest_ns, created, over)
        group = self._group(entry)
        sequence = _number(entry.get("collective_seq_id", entry.get("seq_id")))
        text = self._operation(entry)
        transfer = _TRANSFER.fullmatch(_text(entry.get("profiling_name")))
        if transfer is not None or entry.get("is_p2p") is True:
            group.take_transfer(transfer)
        else:
            group.take_collective(sequence, self._digest(text), created)
        if not _is_over(entry):
            group.take_pending(_pending(entry, sequence, text, transfer))

    def _group(self, entry: Mapping[str, Any]) -> "_Group":
        named = entry.get("process_group", entry.get("pg_name"))
        pair = named if isinstance(named, list | tuple) else (named, "")
        name = _text(pair[0]) if pair else ""
        group = self._groups.get(name)
        if group is None:
            description = _text(pair[1]) if len(pair) > 1 else ""
            group = self._groups[name] = _Group(name, description, _number(entry.get("pg_id"), -1))
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
        for one in sizes:
            is_size = isinstance(one, list | tuple) and set(map(type, one)) <= {int}
            shape.append(tuple(one) if is_size else (-1,))
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
        return "+".join("x".join(map(str, one)) for one in self._shape(sizes) or ())

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
            problems.append(f"{self._bad} entries are no entries, and were left out")
        if self._nameless:
            problems.append(f"{self._nameless} entries say of no operation, and were left out")
        texts = [(digest, text) for text, digest in self._digests.items()]
        return RankSummary(
            rank=rank,
            version=version,
            newest_ns=self._newest_ns,
            taken_ns=taken_ns,
            entries=self._count,
            lost=max(0, self._highest + 1 - self._count),
            groups=tuple(
                group.record(self._members(group), self._status_of(group))
                for group in self._groups.values()
            ),
            texts=tuple(texts[-_MOST_TEXTS:]),
            problems=tuple(problems),
        )

    def _members(self, group: "_Group") -> tuple[int, ...]:
        config = _mapping(self._config.get(group.name))
        ranks = config.get("ranks")
        if isinstance(ranks, str) and re.fullmatch(r"[\[\]0-9, ]*", ranks):
            ranks = [int(one) for one in re.findall(r"\d{1,9}", ranks)]
        if not isinstance(ranks, list | tuple):
            return ()
        return tuple(_number(one, -1) for one in ranks)

    def _status_of(self, group: "_Group") -> Mapping[str, Any]:
        return _mapping(self._status.get(str(group.id), self._status.get(group.id)))


class _Group:
    """One process group of one rank, while its entries are read."""

    def __init__(self, name: str, description: str, number: int) -> None:
        self.name = name
        self.id = number
        self._description = description
        self._calls: dict[int, int] = {}
        self._pending: list[Pending] = []
        self._unlisted = 0
        self._sends: dict[int, int] = {}
        self._receives: dict[int, int] = {}
        self._before_ns = 0
        self._longest_ns = 0
        self._knows_starts = False

    def take_collective(self, sequence: int, digest: int, created_ns: int) -> None:
        before = self._calls.get(sequence)
        # One sequence number may stand for several calls that were made together.
        self._calls[sequence] = digest if before is None else (before * 31 + digest) % _LARGEST
        if self._before_ns and created_ns > self._before_ns:
            self._longest_ns = max(self._longest_ns, created_ns - self._before_ns)
        self._before_ns = max(self._before_ns, created_ns)

    def take_transfer(self, transfer: "re.Match[str] | None") -> None:
        if transfer is not None:
            counts = self._sends if transfer[1] == "send" else self._receives
            peer = int(transfer[4])
            counts[peer] = counts.get(peer, 0) + 1

    def take_pending(self, pending: Pending) -> None:
        self._knows_starts |= pending.state != "scheduled"
        if len(self._pending) < _MOST_PENDING:
            self._pending.append(pending)

    def record(self, members: tuple[int, ...], status: Mapping[str, Any]) -> GroupRecord:
        numbers = sorted(self._calls)
        first, last = (numbers[0], numbers[-1]) if numbers else (0, 0)
        is_dense = last - first < 4 * len(numbers) + 64
        span = range(first, last + 1) if is_dense else range(last, last + 1)
        oldest = min((one.sequence for one in self._pending if one.peer is None), default=last + 1)
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


def _is_over(entry: Mapping[str, Any]) -> bool:
    """Whether an entry is over. gloo's never leave `scheduled`, and are then only retired."""
    if entry.get("state") == "completed":
        return not _has_timed_out(entry)
    is_retired = entry.get("retired") is True
    return is_retired and _text(entry.get("profiling_name")).startswith("gloo")


def _has_timed_out(entry: Mapping[str, Any]) -> bool:
    """Some releases record a collective as completed when it was given up."""
    began = _number(entry.get("time_discovered_started_ns")) or _number(
        entry.get("time_created_ns")
    )
    over = _number(entry.get("time_discovered_completed_ns"))
    timeout_ns = _number(entry.get("timeout_ms")) * 1_000_000
    return bool(timeout_ns and over and began and over - began >= timeout_ns)


def _pending(
    entry: Mapping[str, Any], sequence: int, text: str, transfer: "re.Match[str] | None"
) -> Pending:
    state: State = "started" if entry.get("state") == "started" else "scheduled"
    return Pending(
        sequence=sequence,
        operation=readable(text),
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
    return "+".join(sorted({_text(one)[:24] for one in dtypes[:256]}))


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
