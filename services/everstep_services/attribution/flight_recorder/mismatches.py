"""Whether the ranks of a group call the same collectives, in the same order."""

from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from everstep_services.attribution.flight_recorder.fields import readable
from everstep_services.attribution.flight_recorder.summary import GroupRecord

Difference = Literal["operation", "size", "dtype", "order", "skipped", "extra"]


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first collective that not all ranks of a group call alike."""

    sequence: int
    majority: str
    """The call of most ranks."""
    odd: Mapping[int, tuple[Difference, str]]
    """The other ranks: the difference, and their call."""
    is_clear: bool
    """Whether there is a majority."""
    usual: tuple[int, ...] = ()
    """The ranks of the majority."""
    alike: int = 0
    """The groups that call the same as the majority, where these and not the group's ranks have
    decided."""
    is_new: bool = False
    """Whether what each rank itself has called before has decided."""


class CallTexts:
    """The texts of the digests of calls."""

    def __init__(self) -> None:
        self._texts: dict[int, str] = {}

    def add(self, texts: tuple[tuple[int, str], ...]) -> None:
        self._texts.update(texts)

    def parts(self, digest: int) -> list[str]:
        return (self._texts.get(digest, "a call that the dumps do not describe") + "|||").split("|")

    def readable(self, digest: int) -> str:
        return readable(self._texts.get(digest, "several calls at once"))


def find_mismatch(records: Mapping[int, GroupRecord], texts: CallTexts) -> Mismatch | None:
    """The first difference after the start of all rings; None if there is none.

    Ranks that have not come to a call do not keep the others from being compared there.
    """
    seen = {rank: record for rank, record in records.items() if record.calls}
    if len(seen) < 2:
        return None
    first = max(record.first for record in seen.values())
    spans = {rank: record.calls[(first - record.first) * 8 :] for rank, record in seen.items()}
    shared = min(map(len, spans.values()))
    start = shared // 8 if len({span[:shared] for span in spans.values()}) == 1 else 0
    calls = {rank: array("Q", span) for rank, span in spans.items()}
    for at in range(start, max(map(len, calls.values()))):
        column = {rank: row[at] for rank, row in calls.items() if at < len(row) and row[at]}
        if len(set(column.values())) > 1:
            return _mismatch(first + at, at, column, calls, texts)
    return None


def by_own_past(mismatch: Mismatch, records: Mapping[int, GroupRecord]) -> Mismatch:
    """The mismatch without a majority, judged by the sizes that each rank itself had before.

    The side whose ranks have never called this in the group differs, if all ranks of the other side
    have.
    """
    if mismatch.is_clear or {kind for kind, _ in mismatch.odd.values()} != {"size"}:
        return mismatch
    sides = (frozenset(mismatch.odd), frozenset(mismatch.usual))
    new = {rank for side in sides for rank in side if _is_new(records[rank], mismatch.sequence)}
    texts = {text for _, text in mismatch.odd.values()}
    if new not in sides or len(texts) != 1:
        return mismatch
    usual, odd = mismatch.majority, mismatch.odd
    if new == sides[1]:
        odd = dict.fromkeys(mismatch.usual, ("size", usual))
        usual = texts.pop()
    ranks = tuple(sorted(sides[new == sides[0]]))
    return Mismatch(mismatch.sequence, usual, odd, is_clear=True, usual=ranks, is_new=True)


def _is_new(record: GroupRecord, sequence: int) -> bool:
    """Whether the rank has called other things in the group, but never this."""
    at = sequence - record.first
    calls = array("Q", record.calls)
    return at > 0 and calls[at] not in calls[:at]


def _mismatch(
    sequence: int,
    at: int,
    column: Mapping[int, int],
    calls: Mapping[int, "array[int]"],
    texts: CallTexts,
) -> Mismatch:
    ordered = Counter(column.values()).most_common(2)
    usual = ordered[0][0]
    model = next(rank for rank, call in column.items() if call == usual)
    odd = {
        rank: (_difference(at, calls[rank], calls[model], texts), texts.readable(call))
        for rank, call in column.items()
        if call != usual
    }
    is_clear = ordered[0][1] > ordered[1][1]
    ranks = tuple(rank for rank, call in column.items() if call == usual)
    return Mismatch(sequence, texts.readable(usual), odd, is_clear, ranks)


def _difference(at: int, odd: "array[int]", usual: "array[int]", texts: CallTexts) -> Difference:
    """The kind of a difference, by the next calls of the rank and of the others."""
    next_odd, next_usual = odd[at + 1 : at + 2], usual[at + 1 : at + 2]
    is_behind = next_odd == usual[at : at + 1]
    is_ahead = next_usual == odd[at : at + 1]
    if is_behind and is_ahead:
        return "order"
    if is_ahead:
        return "skipped"
    if is_behind:
        return "extra"
    mine, theirs = texts.parts(odd[at]), texts.parts(usual[at])
    if mine[0] != theirs[0]:
        return "operation"
    return "size" if mine[1:3] != theirs[1:3] else "dtype"
