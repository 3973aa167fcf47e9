"""What groups like another one called next: where a group is too small for a majority. Pure.

Groups are alike if they have as many ranks, and have called the same until then: the groups of
tensor parallelism of one stage, or those of data parallelism.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Mapping

from everstep_services.attribution.flight_recorder.mismatches import CallTexts, Difference, Mismatch
from everstep_services.attribution.flight_recorder.summary import GroupRecord

_LEAST_VOTES = 2
_FLIPPED: Mapping[Difference, Difference] = {"skipped": "extra", "extra": "skipped"}
_NOTHING = 0
"""The call of a group that has not called anything at a number."""


def next_calls(
    records: Mapping[int, GroupRecord],
    sequence: int,
    others: Iterable[tuple[int, Mapping[int, GroupRecord]]],
    size: int,
) -> Counter[int]:
    """The digests of the calls at a number in groups that are alike, with their numbers."""
    own = _longest(records)
    return Counter(
        _call(theirs, sequence)
        for their_size, theirs_of in others
        if their_size == size
        and theirs_of is not records
        and (theirs := _longest(theirs_of)) is not None
        and own is not None
        and _are_alike(own, theirs, sequence)
        and len({_call(it, sequence) for it in theirs_of.values() if it.enqueued >= sequence}) < 2
    )


def settled(mismatch: Mismatch, calls: Counter[int], texts: CallTexts) -> Mismatch:
    """The mismatch without a majority, judged by what other groups called there."""
    votes = Counter({texts.readable(call): count for call, count in calls.items() if call})
    sides = {mismatch.majority, *(text for _, text in mismatch.odd.values())}
    told = [side for side in sides if votes[side]]
    if mismatch.is_clear or len(told) != 1 or votes[told[0]] < _LEAST_VOTES:
        return mismatch
    usual = told[0]
    odd = {rank: it for rank, it in mismatch.odd.items() if it[1] != usual}
    if usual != mismatch.majority:
        difference = next(kind for kind, text in mismatch.odd.values() if text == usual)
        flipped = _FLIPPED.get(difference, difference)
        odd |= dict.fromkeys(mismatch.usual, (flipped, mismatch.majority))
    return Mismatch(mismatch.sequence, usual, odd, is_clear=True, alike=votes[usual])


def call_at(records: Mapping[int, GroupRecord], sequence: int) -> int:
    """The digest of the call of a group at a number."""
    longest = _longest(records)
    return _NOTHING if longest is None else _call(longest, sequence)


def _longest(records: Mapping[int, GroupRecord]) -> GroupRecord | None:
    return max(records.values(), key=lambda record: record.enqueued, default=None)


def _are_alike(own: GroupRecord, theirs: GroupRecord, sequence: int) -> bool:
    """Whether both have called the same before a number, as far as their rings go back."""
    if theirs.enqueued < sequence - 1:
        return False
    first = max(own.first, theirs.first, 1)
    return _between(own, first, sequence) == _between(theirs, first, sequence)


def _between(record: GroupRecord, first: int, end: int) -> bytes:
    begin = max(record.first, 1)
    return record.calls[8 * (first - begin) : 8 * max(end - begin, 0)]


def _call(record: GroupRecord, sequence: int) -> int:
    at = 8 * (sequence - max(record.first, 1))
    call = array("Q", record.calls[at : at + 8]) if at >= 0 else ()
    return call[0] if call else _NOTHING
