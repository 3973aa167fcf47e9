"""Hours of nonsense in minutes: every subject of every service, with what nobody should send."""

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.hostile_bus import ControlPlane, Input, inputs

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        yield running


@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=st.lists(inputs(), min_size=5, max_size=40))
def test_no_input_ends_a_service(plane: ControlPlane, sent: list[Input]) -> None:
    """A thousand series of inputs, and all services live (A13.3)."""
    plane.send(sent)
    assert not plane.ended
    assert not plane.failures()
