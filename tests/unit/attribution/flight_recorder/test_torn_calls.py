"""Whose tensors have another size, where the end of the ranks has torn the call for all of them."""

from array import array
from collections.abc import Mapping, Sequence

import pytest

from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.report import FlightReport
from everstep_services.attribution.flight_recorder.summary import GroupRecord, RankSummary

USUAL, WIDER, OTHER = 8, 9, 5
TEXTS = tuple((size, f"all_reduce|[{size}]|[{size}]|Float") for size in (USUAL, WIDER, OTHER))


def report(rows: Mapping[int, Sequence[int]], *, sizes_differ: bool = True) -> FlightReport:
    """Ranks of one group of four that have called these; nothing of it waits any more."""
    analysis, members = FlightAnalysis(world=8), array("I", (0, 2, 4, 6)).tobytes()
    for rank, calls in rows.items():
        record = GroupRecord(
            name="9", members=members, first=1, calls=array("Q", calls).tobytes(),
            enqueued=len(calls), completed=len(calls),
        )  # fmt: skip
        analysis.add(RankSummary(rank=rank, entries=len(calls), groups=(record,), texts=TEXTS))
    return analysis.report(sizes_differ=sizes_differ)


@pytest.mark.parametrize("odd", [2, 6])
@pytest.mark.parametrize("others", [1, 2])
def test_of_ranks_that_lost_a_call_the_one_with_a_new_size_is_named(odd: int, others: int) -> None:
    rows = dict.fromkeys({2, 4, 6} - {odd}, (USUAL, USUAL, USUAL))
    kept = dict(list(rows.items())[:others])
    (fault,) = report({**kept, odd: (USUAL, USUAL, WIDER)}).faults
    assert (fault.kind, [it.rank for it in fault.suspects]) == ("mismatch", [odd])


@pytest.mark.parametrize(
    "rows",
    [
        {2: (USUAL, WIDER), 6: (USUAL, OTHER)},  # both are new
        {2: (USUAL, WIDER, USUAL), 6: (USUAL, WIDER, WIDER)},  # both were there before
        {2: (WIDER,), 6: (USUAL,)},  # nobody has a past
        {2: (USUAL, USUAL), 6: (USUAL, USUAL)},
    ],
)
def test_where_the_past_of_the_ranks_tells_nothing_nobody_is_named(
    rows: Mapping[int, Sequence[int]],
) -> None:
    assert report(rows).faults == ()


def test_without_the_word_of_the_backend_a_torn_call_shows_nothing() -> None:
    assert report({2: (USUAL, WIDER), 6: (USUAL, USUAL)}, sizes_differ=False).faults == ()
