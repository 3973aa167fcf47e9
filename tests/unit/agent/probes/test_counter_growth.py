"""How a counter is followed over looks."""

from hypothesis import given
from hypothesis import strategies as st

from everstep_services.agent.probes.notes import Sample, note


def test_growth_is_counted_from_the_last_sample_before_the_window() -> None:
    samples: list[Sample] = []
    growths = [
        note(samples, value, at=at, window_s=100) for at, value in [(0, 5), (60, 7), (150, 10)]
    ]
    assert [growth.steps for growth in growths] == [(), (2,), (2, 3)]
    assert note(samples, 10, at=161, window_s=100).steps == (3, 0)
    assert note(samples, 10, at=400, window_s=100).total == 0


def test_a_counter_that_went_back_has_begun_anew() -> None:
    samples: list[Sample] = [[0.0, 900.0]]
    assert note(samples, 4, at=1, window_s=100).total == 4


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.integers(0, 1000)), max_size=200), st.floats(1, 1000)
)
def test_samples_are_bounded_and_growth_is_never_negative(
    looks: list[tuple[float, int]], window_s: float
) -> None:
    samples: list[Sample] = []
    at = 0.0
    for step_s, value in looks:
        at += step_s
        growth = note(samples, value, at=at, window_s=window_s)
        assert growth.total >= 0
        assert len(samples) <= 65
        assert growth.looks_past(0) <= len(growth.steps)
