"""The calls and the groups of a dump while its entries are read: what repeats is read once."""

import re
from array import array
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from everstep_services.attribution.flight_recorder.fields import LARGEST, number_of, text_of
from everstep_services.attribution.flight_recorder.summary import GroupRecord, Pending

_MOST_PENDING = 64
_SAME = (
    "profiling_name", "process_group", "pg_name", "pg_id", "input_sizes", "output_sizes",
    "input_dtypes", "output_dtypes", "is_p2p",
)  # fmt: skip
"""The fields that entries of equal calls have in common."""
_NUMBERS = (
    "record_id", "collective_seq_id", "time_created_ns", "time_discovered_completed_ns",
    "time_discovered_started_ns", "timeout_ms", "state",
)  # fmt: skip


class GroupReader:
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
        self._calls[sequence] = digest if before is None else (before * 31 + digest) % LARGEST
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
            self._calls[first] = 0  # the ring may have lost some calls of this batch
        is_dense = last - first < 4 * len(numbers) + 64
        span = range(first, last + 1) if is_dense else range(last, last + 1)
        oldest = min(
            (call.sequence for call in self._pending if call.peer is None), default=last + 1
        )
        if not self._counts_collectives_only():
            status = {}
        completed = number_of(status.get("last_completed_collective"), -1)
        has_status = completed >= 0
        if not has_status or (numbers and first <= completed + 1):
            # The ring has all calls that the status lacks, and a status is written later.
            completed = max(completed, oldest - 1)
        return GroupRecord(
            name=self.name,
            description=self._description,
            members=members,
            first=span.start if numbers else 0,
            calls=array("Q", (self._calls.get(n, 0) for n in span)).tobytes() if numbers else b"",
            enqueued=max(last, number_of(status.get("last_enqueued_collective"), 0)),
            completed=completed,
            has_status=has_status,
            pending=tuple(self._pending),
            sends=tuple(sorted(self._sends.items())),
            receives=tuple(sorted(self._receives.items())),
            longest_gap_ns=self._longest_ns,
            knows_starts=self._knows_starts
            or number_of(status.get("last_started_collective"), -1) >= 0,
        )


class RecordedCall:
    """A call that entries repeat: their common fields, read once."""

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
        group: GroupReader,
        text: str,
        digest: int,
        transfer: "re.Match[str] | None",
    ) -> None:
        self._same: tuple[Any, ...] = _same(entry)
        self.usual: tuple[Any, ...] | None = None
        """The same by `UsualFields.same_of`."""
        self.group = group
        self.text = text
        self.digest = digest
        self.transfer = transfer
        self.is_close = text_of(entry.get("profiling_name")).endswith("coalesced")
        """Whether this is the last entry of calls that were made together."""
        self.is_transfer = transfer is not None or entry.get("is_p2p") is True
        self.next: RecordedCall | None = None
        """The call that followed it last time: jobs repeat themselves."""

    def forget(self) -> None:
        """Recognise no other entry: comparing them would take too long."""
        self._same = ()
        self.usual = None

    def is_made_by(self, entry: Mapping[str, Any]) -> bool:
        return self._same == _same(entry)


def _same(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(map(entry.get, _SAME))


class UsualFields:
    """Reads the fields of entries that have the same fields as a first entry."""

    __slots__ = ("_absent", "_numbers_of", "_same_of")

    def __init__(self, entry: Mapping[str, Any]) -> None:
        absent = [name for name in _SAME if name not in entry]
        self._absent = absent[0] if len(absent) == 1 else None
        self._same_of = itemgetter(*(name for name in _SAME if name in entry), _SAME[0])
        self._numbers_of = itemgetter(*_NUMBERS)

    def same(self, entry: Mapping[str, Any]) -> tuple[Any, ...] | None:
        """The common fields of equal calls; None for an entry with other fields."""
        if self._absent is None or self._absent in entry:
            return None
        try:
            return self._same_of(entry)  # type: ignore[no-any-return]
        except KeyError:
            return None

    def numbers(self, entry: Mapping[str, Any]) -> tuple[int, int, int, int] | None:
        """Record, sequence, begin and end of an entry that is over; None if it may not be over."""
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
            or not 0 <= record | sequence | created | over | began | timeout_ms < LARGEST
            or over - (began or created) >= timeout_ms * 1_000_000
        ):
            return None
        return record, sequence, created, over
