"""Many connections to a server that is killed: all are back, and not in one moment."""

from pathlib import Path

import pytest

from benchmarks.returns import measured

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]
CONNECTIONS = 1000
"""`python -m benchmarks.returns` has the 5 000 of A14.2, and its figures."""


async def test_all_come_back_without_a_storm_and_none_is_closed(tmp_path: Path) -> None:
    """A14.2: spread by the jitter, with no login that the server finds too late."""
    seen = await measured(tmp_path, CONNECTIONS)
    assert seen.back == CONNECTIONS
    assert seen.late_logins == 0
    assert seen.peak_per_s <= seen.bound_per_s
