"""Which old jobs stay, and how large a page of a removal may be."""

import pytest

from everstep_services.history.retention import PagePace, reason_to_keep


@pytest.mark.parametrize(
    ("labels", "is_corrected", "pinned", "reason"),
    [
        ({}, False, [], ""),
        ({"keep": "no"}, False, [], ""),
        ({"keep": "true"}, False, [], "it has the label keep=true"),
        ({}, False, [100, 300], "its checkpoint of step 300 is pinned"),
        ({}, True, [], "a person has named the cause of one of its incidents"),
    ],
)
def test_pinned_labelled_and_corrected_jobs_stay(
    labels: dict[str, str], is_corrected: bool, pinned: list[int], reason: str
) -> None:
    found = reason_to_keep(
        labels, wanted=("keep=true",), is_corrected=is_corrected, pinned_steps=pinned
    )
    assert found == reason


def test_pages_that_are_slow_become_small_and_rest_as_long_as_they_took() -> None:
    pace = PagePace(400)
    assert pace.rest_s(0.2) == pytest.approx(0.2)
    assert pace.rows == 200
    for _ in range(10):
        pace.rest_s(1.0)
    assert pace.rows == 100
    assert pace.rest_s(0.001) == pytest.approx(0.01)
    for _ in range(20):
        pace.rest_s(0.001)
    assert pace.rows == 2000
