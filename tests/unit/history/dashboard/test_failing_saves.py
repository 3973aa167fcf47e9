"""When failing saves are a concern of the fleet's page."""

from datetime import UTC, datetime, timedelta

import pytest

from everstep_services.history.dashboard.pages.fleet import _of_failing

NOW = datetime(2026, 11, 28, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("tier", "ago_s", "is_shown"),
    [("peer", 10, False), ("memory", 10, False), ("peer", 120, True), ("global", 10, True)],
)
def test_one_copy_that_was_skipped_is_not_a_failure_until_the_next_report(
    tier: str, ago_s: float, is_shown: bool
) -> None:
    failed_at = (NOW - timedelta(seconds=ago_s)).isoformat()
    save = {"job": "j", "tier": tier, "failed_at": failed_at, "failed_reason": "skipped"}
    assert [concern.kind for concern in _of_failing([save], NOW)] == ["checkpoint"] * is_shown
