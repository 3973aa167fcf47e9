"""Sketches of durations merge without loss, and their error is the one they state."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.messages import Sketch
from tests.unit.messages.sketches import sketch_of

DURATIONS = st.lists(st.floats(1e-7, 1e5), max_size=50)


@given(DURATIONS, DURATIONS)
def test_a_merged_sketch_is_the_sketch_of_both(some: list[float], others: list[float]) -> None:
    merged, both = sketch_of(some).merged(sketch_of(others)), sketch_of(some + others)
    assert msgspec.structs.replace(merged, sum_s=0.0) == msgspec.structs.replace(both, sum_s=0.0)
    assert merged.sum_s == pytest.approx(both.sum_s)


@given(DURATIONS.filter(bool), st.floats(0, 1))
def test_a_quantile_is_off_by_less_than_it_says(some: list[float], share: float) -> None:
    rank = max(1, -int(-share * len(some) // 1))
    assert sketch_of(some).quantile_s(share) == pytest.approx(sorted(some)[rank - 1], rel=0.045)


@given(st.floats(1e-8, 1e8))
def test_a_duration_lies_in_the_bucket_that_the_rule_says(duration_s: float) -> None:
    ((index, count),) = sketch_of([duration_s]).buckets
    assert count == 1
    assert 2 ** ((index - 1) / 8) * (1 - 1e-9) <= duration_s <= 2 ** (index / 8) * (1 + 1e-9)


def test_the_edges_of_a_sketch() -> None:
    assert sketch_of([]) == Sketch()
    assert Sketch().quantile_s(0.5) == 0.0
    assert sketch_of([1.0]).buckets == ((0, 1),)
    assert sketch_of([-1.0, 0.0]).max_s == 0.0
    assert sketch_of([0.0]).merged(Sketch()) == Sketch().merged(sketch_of([0.0]))
